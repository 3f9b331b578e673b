"""Workers of both roles in one process: the code that serves, a virtual clock, a network with faults, and one seed."""

import random
from dataclasses import dataclass

from msgspec.structs import replace
from tests.pure.handoff_rules import Referee, RuleBroken
from tests.pure.handoff_story import Story, require_true_story
from tests.pure.handoff_worker import Ground, Link, Worker
from tests.pure.toy_model import GQA

from pdserve.clock import VirtualClock
from pdserve.config.role import Role
from pdserve.fabric.memory import MemoryFaults, MemoryNetwork
from pdserve.ids import Incarnation, RequestId
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.sampling import SamplingParams
from pdserve.units import NS_PER_MS, NS_PER_S
from pdserve.wire.cluster import Failed, Generate, Generated, PrefillTarget
from pdserve.wire.peer import Cancel, Grant, GrantRefused, HandoffStopped

DECODE_PAGES = 24
PREFILL_PAGES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the cache is spread over ranks. A second worker of a role is sharded like the first of the other role."""

    layout: KvLayout = GQA
    prefill_ranks: int = 1
    decode_ranks: int = 1
    num_dp_ranks: int = 1
    """Of each decode worker."""
    draft_layout: KvLayout | None = None
    """Of the cache of a drafter on every worker."""

    def sharding(self, role: Role, index: int) -> KvSharding:
        is_like_prefill = (role is Role.PREFILL) == (index % 2 == 0)
        return KvSharding(layout=self.layout, num_ranks=self.prefill_ranks if is_like_prefill else self.decode_ranks)


class World:
    """Everything that can happen to it is a method; `test_handoff_world` draws which happens next."""

    def __init__(
        self, seed: int, shape: Shape, *, faults: MemoryFaults, num_decode: int = 1, num_prefill: int = 1
    ) -> None:
        self.draw = random.Random(seed)
        self.shape = shape
        self.clock = VirtualClock(NS_PER_S)
        self.network = MemoryNetwork(seed, self.clock, faults)
        self.referee = Referee()
        self._ground = Ground(clock=self.clock, network=self.network, referee=self.referee)
        self.stories: dict[RequestId, Story] = {}
        self._num_incarnations = 0
        self._retired: list[Worker] = []
        self.decode = [self._worker(Role.DECODE, index) for index in range(num_decode)]
        self.prefill = [self._worker(Role.PREFILL, index) for index in range(num_prefill)]
        self.connect_all()

    def _worker(self, role: Role, index: int) -> Worker:
        self._num_incarnations += 1
        is_decode = role is Role.DECODE
        return Worker(
            self._ground,
            role,
            incarnation=Incarnation(self._num_incarnations),
            sharding=self.shape.sharding(role, index),
            draft_layout=self.shape.draft_layout,
            num_pages=DECODE_PAGES if is_decode else PREFILL_PAGES,
            num_dp_ranks=self.shape.num_dp_ranks if is_decode else 1,
        )

    @property
    def now_ns(self) -> int:
        return self.clock.now_ns()

    @property
    def links(self) -> list[Link]:
        return self._ground.links

    @property
    def workers(self) -> list[Worker]:
        return [*self.decode, *self.prefill]

    def close(self) -> None:
        for worker in [*self.workers, *self._retired]:
            worker.close()

    # What goes on

    def pass_time(self, duration_ns: int) -> None:
        self.clock.advance_ns(duration_ns)
        self.network.pump()
        for worker in self.workers:
            if not worker.is_stalled and self.draw.random() < 0.5:
                worker.core.on_time(self.now_ns)

    def deliver_to_prefill(self, link: Link) -> None:
        """The next message, or the end of the connection."""
        if link.prefill.is_stalled or link.prefill_knows:
            return
        peer, role = link.decode.incarnation, link.prefill.core.prefill
        assert role is not None
        if link.to_prefill:
            match link.to_prefill.popleft():
                case Grant() as grant:
                    role.on_grant(peer, grant, now_ns=self.now_ns)
                case Cancel() as cancel:
                    role.on_cancel(peer, cancel, now_ns=self.now_ns)
                case message:
                    raise RuleBroken(f"a prefill worker got {message}")
        elif not link.is_open:
            link.prefill_knows = True
            link.prefill.core.peer_lost(peer, now_ns=self.now_ns)

    def deliver_to_decode(self, link: Link) -> None:
        if link.decode.is_stalled or link.decode_knows:
            return
        peer, core = link.prefill.incarnation, link.decode.core
        assert core.receiver is not None
        if link.to_decode:
            match link.to_decode.popleft():
                case GrantRefused() | HandoffStopped() as message:
                    core.receiver.on_message(peer, message, now_ns=self.now_ns)
                    core.advance(now_ns=self.now_ns)
                case message:
                    raise RuleBroken(f"a decode worker got {message}")
        elif not link.is_open:
            link.decode_knows = True
            core.peer_lost(peer, now_ns=self.now_ns)

    def connect_all(self) -> None:
        """A link for each pair that has none and may have one."""
        self.links[:] = [link for link in self.links if not (link.decode_knows and link.prefill_knows)]
        paired = {(link.decode, link.prefill) for link in self.links}
        for decode in self.decode:
            for prefill in self.prefill:
                receiver, sender = decode.core.receiver, prefill.core.sender
                assert receiver is not None and sender is not None
                if (decode, prefill) in paired or not receiver.can_join(prefill.incarnation):
                    continue
                hello = decode.hello()
                sender.peer_joined(hello)
                receiver.peer_joined(
                    worker_id=prefill.identity.worker_id,
                    incarnation=prefill.incarnation,
                    sharding=prefill.identity.sharding,
                    regions=hello.regions,
                )
                self.links.append(Link(decode, prefill, hello.regions))

    # What the gateway does

    def submit(
        self, worker: Worker, prompt: tuple[int, ...], *, max_tokens: int, timeout_s: float, is_remote: bool
    ) -> None:
        target: PrefillTarget | None = None
        if is_remote:
            prefill = self.draw.choice(self.prefill)
            target = PrefillTarget(
                worker_id=prefill.identity.worker_id, incarnation=prefill.incarnation, url="http://toy"
            )
        generate = Generate(
            request_id=RequestId(f"request-{len(self.stories)}"),
            receiver=worker.incarnation,
            dp_rank=self.draw.randrange(len(worker.engines)),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            prefill=target,
            timeout_s=timeout_s,
        )
        self.stories[generate.request_id] = Story(generate, self.shape.layout)
        if worker.core.on_generate(generate, now_ns=self.now_ns):
            raise RuleBroken(f"H7: {generate.request_id} found no rank")

    def open_stories(self) -> list[Story]:
        return [story for story in self.stories.values() if not story.endings]

    def abort(self, story: Story) -> None:
        for worker in self.decode:
            if worker.incarnation == story.generate.receiver:
                story.endings.append("aborted")
                worker.core.on_abort(story.generate.request_id, now_ns=self.now_ns)
                worker.core.advance(now_ns=self.now_ns)

    def listen(self) -> None:
        """Take what the decode workers say, and hold it against the reference (H7, H8)."""
        for worker in self.decode:
            for message in worker.core.take_messages():
                match message:
                    case Generated():
                        for delta in message.deltas:
                            story = self.stories[delta.request_id]
                            story.token_ids += delta.token_ids
                            story.place = delta.prefill or story.place
                            if delta.finish_reason is not None:
                                story.endings.append(delta.finish_reason.value)
                    case Failed():
                        self.stories[message.request_id].endings.append(message.kind.value)
                    case _:
                        raise RuleBroken(f"the gateway got {message}")
            worker.core.take_ended()
        for story in self.stories.values():
            require_true_story(story)

    # What goes wrong

    def break_link(self, link: Link) -> None:
        """Some of what was under way still comes, then the end."""
        link.is_open = False
        for queue in (link.to_prefill, link.to_decode):
            for _ in range(self.draw.randint(0, len(queue))):
                queue.pop()

    def restart(self, worker: Worker) -> None:
        """Kill a worker; another takes its place at once, under a new incarnation. Its requests end with it."""
        self.network.kill(worker.fabric)
        for link in self.links:
            if worker in (link.decode, link.prefill):
                self.break_link(link)
                link.decode_knows |= worker is link.decode
                link.prefill_knows |= worker is link.prefill
        for story in self.open_stories():
            if story.generate.receiver == worker.incarnation:
                story.endings.append("lost")
        group = self.decode if worker in self.decode else self.prefill
        index = group.index(worker)
        group[index] = self._worker(worker.role, index)
        self._retired.append(worker)

    def send_stale(self, link: Link) -> None:
        """A message that names an earlier incarnation comes in, and must change nothing (H4)."""
        sender, receiver = link.prefill.core.sender, link.decode.core.receiver
        known = [grant for key, grant in self.referee.grants.items() if key[0] == link.decode.incarnation]
        if not known or sender is None or receiver is None or not link.is_open:
            return
        handoff_id, old = self.draw.choice(known).handoff_id, Incarnation(0)
        ours, theirs = link.decode.incarnation, link.prefill.incarnation
        before = sender.num_stale_messages + receiver.num_stale_messages
        if self.draw.random() < 0.5 and not link.prefill.is_stalled and not link.prefill_knows:
            cancel = Cancel(sender=ours, receiver=old, handoff_id=handoff_id)
            assert link.prefill.core.prefill is not None
            link.prefill.core.prefill.on_cancel(ours, cancel, now_ns=self.now_ns)
        else:
            stopped = HandoffStopped(sender=theirs, receiver=old, handoff_id=handoff_id, message="")
            receiver.on_message(theirs, stopped, now_ns=self.now_ns)
            receiver.on_message(theirs, replace(stopped, sender=old, receiver=ours), now_ns=self.now_ns)
        if sender.num_stale_messages + receiver.num_stale_messages == before:
            raise RuleBroken("H4: a message of an earlier incarnation was not refused")

    def settle(self) -> None:
        """No more faults: everything must come to its end by itself, in bounded time."""
        for worker in self.workers:
            worker.is_stalled = False
        for _ in range(400):
            for link in list(self.links):
                self.deliver_to_prefill(link)
                self.deliver_to_decode(link)
            for worker in self.workers:
                for dp_rank in range(len(worker.engines)):
                    worker.step_pass(dp_rank)
                worker.poll()
            self.listen()
            self.referee.check(self.workers)
            is_busy = any(worker.is_in_pass for worker in self.workers)
            is_busy |= any(link.to_decode or link.to_prefill for link in self.links)
            self.pass_time(NS_PER_MS if is_busy else NS_PER_S)
            self.connect_all()

"""Workers of both roles in one process: the code that serves, a virtual clock, a network with faults, and one seed."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace
from tests.pure.handoff_rules import Referee, RuleBroken, require_kv, shrink_immediates
from tests.pure.handoff_story import Story, require_true_story
from tests.pure.toy_engine import ToyEngine, WatchedBuffer
from tests.pure.toy_tokenizer import letter_tokenizer

from pdserve.clock import VirtualClock
from pdserve.config.role import Role
from pdserve.config.worker import WorkerSettings
from pdserve.decode.request import Request
from pdserve.errors import CapacityError
from pdserve.fabric.memory import MemoryFabric, MemoryFaults, MemoryNetwork
from pdserve.fabric.port import PagePush, RegionDescriptor, SingleWrite
from pdserve.ids import Incarnation, PageIndex, RequestId, WorkerId
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import Batch
from pdserve.shared_region import SharedRegion
from pdserve.transfer.identity import Identity
from pdserve.units import NS_PER_MS, NS_PER_S
from pdserve.wire.cluster import Failed, Generate, Generated, PrefillTarget
from pdserve.wire.peer import PROTOCOL_VERSION, Cancel, Grant, GrantRefused, HandoffStopped, Message, PeerHello
from pdserve.worker.core import FabricRegions, Surroundings, WorkerCore

MAX_MODEL_LEN = 48


@dataclass(slots=True, eq=False)
class Link:
    """The control connection of a pair: ordered both ways; when it breaks, each end sees it after what still came."""

    decode: "Worker"
    prefill: "Worker"
    exposures: tuple[RegionDescriptor, RegionDescriptor]
    to_prefill: deque[Message] = field(default_factory=deque[Message])
    to_decode: deque[Message] = field(default_factory=deque[Message])
    is_open: bool = True
    decode_knows: bool = False
    prefill_knows: bool = False


class ShortFabric(MemoryFabric):
    """A fabric that is sometimes short of room for a push."""

    refuses_next_arm = False

    def arm(self, push: PagePush | SingleWrite) -> None:
        if self.refuses_next_arm:
            self.refuses_next_arm = False
            raise CapacityError("too much is armed", retry_after_s=1.0)
        super().arm(push)


class Worker:
    """One worker without its process: the core, a toy engine and a fabric."""

    def __init__(self, world: "World", role: Role, *, num_pages: int) -> None:
        self.world = world
        self.role = role
        self.incarnation = world.new_incarnation()
        self.engine = ToyEngine(num_pages=num_pages, num_tail_slots=4, max_model_len=MAX_MODEL_LEN, clock=world.clock)
        self.fabric = ShortFabric(world.network, address=b"worker:%d" % self.incarnation)
        world.network.fabrics.append(self.fabric)
        self.fabric.watch(self.engine.counter_region)
        self.is_stalled = False
        self.batch: Batch | None = None
        info = self.engine.info
        self.identity = Identity(
            worker_id=WorkerId(f"{role.value}-{self.incarnation}"),
            incarnation=self.incarnation,
            model_fingerprint=info.model_fingerprint,
            layout=info.layout,
            num_pages=info.num_pages,
            tail_slot_bytes=info.tail_slot_bytes,
        )
        self.core = WorkerCore(self._surroundings())
        if self.core.receiver is not None:
            shrink_immediates(self.core.receiver)
        watch(self.engine.kv_region, lambda start, _: world.referee.kv_written(self, start))
        watch(self.engine.tail_region, self._tail_written)

    def _surroundings(self) -> Surroundings:
        return Surroundings(
            settings=WorkerSettings(
                name=self.identity.worker_id,
                role=self.role,
                join_url="",
                model_dir="",
                model_name="toy",
                chunk_tokens=7,
                saturation_tokens=5,
                max_running=5,
                max_waiting=3,
            ),
            identity=self.identity,
            engine=self.engine.info,
            fabric=self.fabric,
            regions=FabricRegions(
                kv=self.fabric.register(self.engine.kv_region), tail=self.fabric.register(self.engine.tail_region)
            ),
            tokenizer=letter_tokenizer(),
            outbox=self,
            drop_peer=self._drop,
            on_prefilled=self._prefilled,
        )

    def send(self, peer: Incarnation, message: Message) -> None:
        if isinstance(message, Grant):
            self.world.referee.granted(message)
        for link in self.world.links:
            if link.is_open and {link.decode.incarnation, link.prefill.incarnation} == {self.incarnation, peer}:
                (link.to_prefill if link.decode is self else link.to_decode).append(message)
                if isinstance(message, HandoffStopped):
                    in_flight = [self.world.network.exposures.get(part.slices[0].key) for part in link.exposures]
                    num_in_flight = sum(exposure.num_in_flight for exposure in in_flight if exposure is not None)
                    self.world.referee.confirmed(self, link.decode, message.handoff_id, num_in_flight=num_in_flight)

    def poll(self) -> None:
        self.core.on_fabric_events(self.fabric.poll(), now_ns=self.world.now_ns)

    def step_pass(self) -> None:
        """Start a pass, compute a layer of it, or end it."""
        if self.batch is None:
            self.batch = self.core.next_batch(now_ns=self.world.now_ns)
            if self.batch is not None:
                self.world.referee.batch_starts(self, self.batch)
                self.engine.start(self.batch)
            return
        result = self.engine.step()
        if result is not None:
            batch, self.batch = self.batch, None
            self.core.complete(batch, result, now_ns=self.world.now_ns)

    def hello(self) -> PeerHello:
        assert self.core.receiver is not None
        kv, tail = self.core.receiver.expose()
        return PeerHello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self.identity.worker_id,
            incarnation=self.incarnation,
            model_fingerprint=self.identity.model_fingerprint,
            layout=self.identity.layout,
            num_pages=self.identity.num_pages,
            tail_slot_bytes=self.identity.tail_slot_bytes,
            heartbeat_s=1.0,
            lease_s=3.0,
            fabric_provider=self.fabric.provider,
            fabric_address=self.fabric.address,
            kv=kv,
            tail=tail,
        )

    def _drop(self, peer: Incarnation, why: str) -> None:
        del why
        for link in self.world.links:
            if {link.decode.incarnation, link.prefill.incarnation} == {self.incarnation, peer}:
                link.is_open = False

    def _prefilled(self, request: Request, page_indices: tuple[PageIndex, ...]) -> None:
        require_kv(self, request.generate.prompt_token_ids[:-1], page_indices)

    def _tail_written(self, start: int, stop: int) -> None:
        self.world.referee.tail_written(self, start, self.engine.tail_region.buffer[start:stop])


def watch(region: SharedRegion, on_write: Callable[[int, int], None]) -> None:
    assert isinstance(region.buffer, WatchedBuffer)
    region.buffer.on_write = on_write


class World:
    """Everything that can happen to it is a method; `test_handoff_world` draws which happens next."""

    def __init__(self, seed: int, *, faults: MemoryFaults, num_decode: int = 1, num_prefill: int = 1) -> None:
        self.draw = random.Random(seed)
        self.clock = VirtualClock(NS_PER_S)
        self.network = MemoryNetwork(seed, self.clock, faults)
        self.referee = Referee()
        self.stories: dict[RequestId, Story] = {}
        self.links: list[Link] = []
        self._num_incarnations = 0
        self._retired: list[Worker] = []
        self.decode = [Worker(self, Role.DECODE, num_pages=24) for _ in range(num_decode)]
        self.prefill = [Worker(self, Role.PREFILL, num_pages=20) for _ in range(num_prefill)]
        self.connect_all()

    @property
    def now_ns(self) -> int:
        return self.clock.now_ns()

    @property
    def workers(self) -> list[Worker]:
        return [*self.decode, *self.prefill]

    @property
    def servers(self) -> list[Worker]:
        """Workers that take requests."""
        return [worker for worker in self.workers if worker.core.decode is not None]

    def new_incarnation(self) -> Incarnation:
        self._num_incarnations += 1
        return Incarnation(self._num_incarnations)

    def close(self) -> None:
        for worker in [*self.workers, *self._retired]:
            worker.fabric.close()
            worker.engine.close()

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
        self.links = [link for link in self.links if not (link.decode_knows and link.prefill_knows)]
        paired = {(link.decode, link.prefill) for link in self.links}
        for decode in self.decode:
            for prefill in self.prefill:
                receiver, sender = decode.core.receiver, prefill.core.sender
                assert receiver is not None and sender is not None
                if (decode, prefill) in paired or not receiver.can_join(prefill.incarnation):
                    continue
                hello = decode.hello()
                assert hello.kv is not None and hello.tail is not None
                sender.peer_joined(hello)
                receiver.peer_joined(
                    worker_id=prefill.identity.worker_id,
                    incarnation=prefill.incarnation,
                    exposures=(hello.kv, hello.tail),
                )
                self.links.append(Link(decode, prefill, exposures=(hello.kv, hello.tail)))

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
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            prefill=target,
            timeout_s=timeout_s,
        )
        self.stories[generate.request_id] = Story(generate)
        assert worker.core.decode is not None
        worker.core.decode.on_generate(generate, now_ns=self.now_ns)

    def open_stories(self) -> list[Story]:
        return [story for story in self.stories.values() if not story.endings]

    def abort(self, story: Story) -> None:
        for worker in self.servers:
            if worker.incarnation == story.generate.receiver and worker.core.decode is not None:
                story.endings.append("aborted")
                worker.core.decode.on_abort(story.generate.request_id, now_ns=self.now_ns)
                worker.core.advance(now_ns=self.now_ns)

    def listen(self) -> None:
        """Take what the decode workers say, and hold it against the reference (H7, H8)."""
        for worker in self.servers:
            assert worker.core.decode is not None
            for message in worker.core.decode.take_messages():
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
            worker.core.decode.take_ended()
        for story in self.stories.values():
            require_true_story(story)

    # What goes wrong

    def break_link(self, link: Link) -> None:
        """Some of what was under way still comes, then the end."""
        link.is_open = False
        for queue in (link.to_prefill, link.to_decode):
            for _ in range(self.draw.randint(0, len(queue))):
                queue.pop()

    def restart(self, worker: Worker) -> Worker:
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
        successor = Worker(self, worker.role, num_pages=worker.engine.info.num_pages)
        for group in (self.decode, self.prefill):
            if worker in group:
                group[group.index(worker)] = successor
        self._retired.append(worker)
        return successor

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
                worker.step_pass()
                worker.poll()
            self.listen()
            self.referee.check(self.workers)
            is_busy = any(worker.batch for worker in self.workers)
            is_busy |= any(link.to_decode or link.to_prefill for link in self.links)
            self.pass_time(NS_PER_MS if is_busy else NS_PER_S)
            self.connect_all()

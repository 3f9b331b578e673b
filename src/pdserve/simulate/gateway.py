"""The gateway without sockets: the product's dispatcher and registry, and what `pdserve.gateway.hub` does with them."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import assert_never

from pdserve.cluster.registry import Joined, LeaveReason, Left, Refused, Registry
from pdserve.config.role import Role
from pdserve.gateway.dispatcher import Action, Deliver, Dispatcher, Fail, Send, prefill_target
from pdserve.gateway.failures import SHUTTING_DOWN, RequestFailed
from pdserve.ids import Incarnation, RequestId, WorkerId
from pdserve.simulate.agenda import Agenda
from pdserve.simulate.client import Client
from pdserve.simulate.connection import ControlNetwork, End
from pdserve.simulate.gateway_end import GATEWAY
from pdserve.simulate.process import Process
from pdserve.units import NS_PER_MS, NS_PER_S, seconds_to_ns
from pdserve.wire.cluster import (
    Abort,
    Failed,
    GatewayHeartbeat,
    Generate,
    Generated,
    Join,
    JoinRefused,
    Leave,
    PrefillPool,
    Welcome,
    WorkerHeartbeat,
)
from pdserve.wire.peer import Message

TICK_NS = 50 * NS_PER_MS
STALL_NS = NS_PER_S
STALL_GRACE_NS = NS_PER_S // 2
HEARTBEATS_A_LEASE = 4
"""All four as `pdserve.gateway.hub`."""


@dataclass(slots=True, eq=False)
class Member:
    end: End
    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    heartbeat_ns: int
    next_heartbeat_ns: int


class Gateway(Process):
    def __init__(
        self,
        agenda: Agenda,
        control: ControlNetwork,
        *,
        incarnation: Incarnation,
        max_pending: int,
        on_exit: Callable[["Gateway"], None],
    ) -> None:
        """`on_exit` is called once, when it has drained, or the time for that is over."""
        super().__init__(agenda, GATEWAY)
        self.incarnation = incarnation
        self.clients: dict[RequestId, Client] = {}
        self.members: dict[WorkerId, Member] = {}
        self.num_stale = 0
        self.is_draining = False
        self._on_exit = on_exit
        self._registry = Registry(model_name="hashes", max_workers=16)
        self.dispatcher = Dispatcher(self._registry, max_pending=max_pending)
        self._last_tick_ns = self.now_ns
        self._leases_hold_until_ns = 0
        control.listeners[GATEWAY] = (self, self._accept)
        self.every(TICK_NS, self._on_tick)

    # Clients

    def submit(self, client: Client) -> None:
        self.clients[client.work.request_id] = client
        try:
            if self.is_draining:
                raise RequestFailed(SHUTTING_DOWN)
            actions = self.dispatcher.submit(client.work, self.now_ns)
        except RequestFailed as failed:
            client.fail(failed.failure, now_ns=self.now_ns)
        else:
            self._perform(actions)

    def disconnect(self, client: Client) -> None:
        """The client is gone."""
        if not client.endings:
            client.end("left")
            self._perform(self.dispatcher.cancel(client.work.request_id))

    # Its end

    def drain(self, timeout_ns: int) -> None:
        """As under SIGTERM: nothing new, what runs goes on to its end, but no longer than that."""
        if not self.is_draining:
            self.is_draining = True
            self.after(timeout_ns, self._exit)
            self._exit_if_idle()

    def _exit_if_idle(self) -> None:
        if self.is_draining and self.dispatcher.num_pending == 0:
            self.after(0, self._exit)

    def _exit(self) -> None:
        self._perform(self.dispatcher.shut_down())
        self._on_exit(self)

    # Workers

    def on_message(self, member: Member, message: Message) -> None:
        """What a worker that joined says."""
        incarnation = member.incarnation if self.members.get(member.worker_id) is member else None
        match message:
            case WorkerHeartbeat() | Generated() | Failed() | Leave() if message.sender != incarnation:
                self.num_stale += 1
            case WorkerHeartbeat():
                self._registry.heartbeat(member.worker_id, message, self.now_ns)
            case Generated():
                self._perform(self.dispatcher.generated(member.worker_id, message))
            case Failed():
                self._perform(self.dispatcher.failed(member.worker_id, message, self.now_ns))
            case Leave():
                self._leave(member, LeaveReason.SAID_SO)
            case _:
                pass

    def _accept(self, end: End) -> None:
        def first(message: Message) -> None:
            if isinstance(message, Join):
                self._join(end, message)

        end.on_message = first

    def _join(self, end: End, join: Join) -> None:
        changes = self._registry.join(join, self.now_ns)
        if isinstance(changes, Refused):
            end.send(JoinRefused(message=changes.message))
            end.close()
            return
        heartbeat_ns = seconds_to_ns(join.lease_s / HEARTBEATS_A_LEASE)
        member = Member(end, join.worker_id, join.incarnation, join.role, heartbeat_ns, self.now_ns + heartbeat_ns)
        end.on_message = lambda message: self.on_message(member, message)
        end.on_end = lambda: self._lost(member)
        replaced = self.members.get(join.worker_id)
        self.members[join.worker_id] = member
        if replaced is not None:
            replaced.end.close()
        end.send(Welcome(incarnation=self.incarnation, heartbeat_s=join.lease_s / HEARTBEATS_A_LEASE))
        self._apply(changes)

    def _lost(self, member: Member) -> None:
        if self.members.get(member.worker_id) is member:
            self._leave(member, LeaveReason.CLOSED)

    def _leave(self, member: Member, reason: LeaveReason) -> None:
        self._apply(self._registry.leave(member.worker_id, member.incarnation, reason))

    def _apply(self, changes: Iterable[Joined | Left]) -> None:
        for change in changes:
            if isinstance(change, Left):
                if change.reason is not LeaveReason.REPLACED:
                    self.members.pop(change.worker.worker_id).end.close()
                self._perform(self.dispatcher.worker_left(change.worker, self.now_ns))
            pool = PrefillPool(members=tuple(prefill_target(worker) for worker in self._registry.view.prefilling()))
            for member in list(self.members.values()):
                if member.role is Role.DECODE:
                    member.end.send(pool)

    def _perform(self, actions: list[Action]) -> None:
        outstanding = deque(actions)
        while outstanding:
            action = outstanding.popleft()
            match action:
                case Send(worker_id, message):
                    self._note_dependence(worker_id, message)
                    member = self.members.get(worker_id)
                    if member is not None:
                        member.end.send(message)
                case Deliver(request_id, delta):
                    self.clients[request_id].hear(delta)
                case Fail(request_id, failure):
                    self.clients[request_id].fail(failure, now_ns=self.now_ns)
                case _:
                    assert_never(action)
        self._exit_if_idle()

    def _note_dependence(self, worker_id: WorkerId, message: Generate | Abort) -> None:
        if isinstance(message, Generate):
            client = self.clients[RequestId(message.request_id.partition(".")[0])]
            client.depends_on.add(worker_id)
            if message.prefill is not None:
                client.depends_on.add(message.prefill.worker_id)

    def _on_tick(self) -> None:
        now_ns = self.now_ns
        if now_ns - self._last_tick_ns > STALL_NS:
            self._leases_hold_until_ns = now_ns + STALL_GRACE_NS
        self._last_tick_ns = now_ns
        if now_ns >= self._leases_hold_until_ns:
            self._apply(self._registry.expire(now_ns))
        self._perform(self.dispatcher.expire(now_ns))
        for member in list(self.members.values()):
            if member.next_heartbeat_ns <= now_ns:
                member.next_heartbeat_ns = now_ns + member.heartbeat_ns
                member.end.send(GatewayHeartbeat(sender=self.incarnation))

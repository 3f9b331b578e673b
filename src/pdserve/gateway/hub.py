"""The sockets around registry and dispatcher: carries out their actions, keeps the leases, owns the token streams."""

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import assert_never

from pdserve.clock import Clock
from pdserve.cluster.registry import Joined, LeaveReason, Left, Refused, Registry
from pdserve.cluster.view import ClusterView
from pdserve.config.role import Role
from pdserve.errors import PeerLost, RemoteProtocolError
from pdserve.gateway.dispatcher import Action, Deliver, Dispatcher, Fail, PendingWork, Send, Work, prefill_target
from pdserve.gateway.failures import CLIENT_TOO_SLOW, SHUTTING_DOWN, Failure, RequestFailed, no_worker
from pdserve.gateway.open_requests import OpenRequests
from pdserve.gateway.settings import GatewaySettings
from pdserve.gateway.token_stream import TokenStream
from pdserve.ids import Incarnation, RequestId, WorkerId
from pdserve.telemetry.gateway_metrics import GatewayMetrics
from pdserve.units import NS_PER_MS, NS_PER_S, seconds_to_ns
from pdserve.wire.channel import Channel
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
    WorkerToGateway,
)

HANDSHAKE_TIMEOUT_S = 5.0
"""For a worker's `Join` after it connected."""

TICK_S = 0.05
"""How late a lease or a deadline may be noticed."""

STALL_NS = NS_PER_S
"""A tick this late means that the gateway itself stood still, and that heartbeats wait unread in its sockets."""

STALL_GRACE_NS = NS_PER_S // 2
"""After a stall, time to read them before leases are judged again."""

HEARTBEATS_A_LEASE = 4
"""Three may be lost or late before a lease ends."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Connection:
    channel: Channel[WorkerToGateway]
    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    heartbeat_ns: int
    next_heartbeat_ns: int


class Hub:
    """Threads: the event loop's only. Lifetime: `start` to `stop` of the application."""

    def __init__(self, settings: GatewaySettings, metrics: GatewayMetrics, clock: Clock) -> None:
        self.incarnation = Incarnation(secrets.randbits(63))
        self._max_buffered_deltas = settings.max_buffered_deltas
        self._metrics = metrics
        self._clock = clock
        self._registry = Registry(model_name=settings.model_name, max_workers=settings.max_workers)
        self._dispatcher = Dispatcher(self._registry, max_pending=settings.max_pending)
        self._connections: dict[WorkerId, _Connection] = {}
        self._streams: dict[RequestId, TokenStream] = {}
        self.open_requests = OpenRequests()
        self._background: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._stopping = False
        self._num_refused = 0
        """Workers that would decode and were not let in, since one was."""
        self._last_tick_ns = clock.now_ns()
        self._leases_hold_until_ns = 0

    @property
    def view(self) -> ClusterView:
        return self._registry.view

    @property
    def fingerprint(self) -> str | None:
        return self._registry.fingerprint

    @property
    def streams(self) -> Mapping[RequestId, TokenStream]:
        """By what they were submitted as."""
        return MappingProxyType(self._streams)

    @property
    def pending(self) -> tuple[PendingWork, ...]:
        return self._dispatcher.pending

    @property
    def max_model_len(self) -> int | None:
        """The context of whoever may get the next request; None when there is no decode worker. Cost: O(1)."""
        return self._registry.max_model_len

    def require_max_model_len(self) -> int:
        """As `max_model_len`. Raises: `RequestFailed` when there is no decode worker."""
        max_model_len = self.max_model_len
        if max_model_len is None:
            raise RequestFailed(self.no_worker)
        return max_model_len

    @property
    def no_worker(self) -> Failure:
        """What a client is told while nobody takes requests."""
        return no_worker(self.view, num_refused=self._num_refused)

    def start(self) -> None:
        self._ticker = asyncio.create_task(self._tick(), name="gateway hub")

    async def stop(self) -> None:
        """Fail what is pending, say goodbye to the workers."""
        self._stopping = True
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        self._perform(self._dispatcher.shut_down())
        await asyncio.gather(*(connection.channel.close() for connection in self._connections.values()))
        await asyncio.gather(*self._background)

    def submit(self, work: Work) -> TokenStream:
        """Dispatch a request; `release` must follow. Raises: `RequestFailed`, and then nothing is pending."""
        if self._stopping:
            raise RequestFailed(SHUTTING_DOWN)
        actions = self._dispatcher.submit(work, self._clock.now_ns())
        stream = TokenStream(max_deltas=self._max_buffered_deltas * work.num_choices)
        self._streams[work.request_id] = stream
        self._perform(actions)
        return stream

    def release(self, request_id: RequestId) -> bool:
        """The handler is done. True when the request had not ended: the worker is told to stop then."""
        self._streams.pop(request_id, None)
        actions = self._dispatcher.cancel(request_id)
        self._perform(actions)
        return bool(actions)

    async def serve_worker(self, channel: Channel[WorkerToGateway]) -> None:
        """One worker's connection from its `Join` to its end."""
        connection = await self._handshake(channel)
        if connection is None:
            return
        try:
            while True:
                self._handle(connection, await channel.receive())
        except PeerLost as error:
            _log.info("worker_connection_ended peer=%s reason=%s", connection.worker_id, error.message)
        except RemoteProtocolError as error:
            self._metrics.observe_protocol_error()
            _log.warning("worker_broke_protocol peer=%s reason=%s", connection.worker_id, error.message)
        finally:
            if self._connections.get(connection.worker_id) is connection:
                self._leave(connection, LeaveReason.CLOSED)

    def refresh_metrics(self) -> None:
        """Bring the gauges up to date, before they are read."""
        self._metrics.set_requests(num_pending=self._dispatcher.num_pending, num_retries=self._dispatcher.num_retries)
        self._metrics.workers.clear()
        for worker in self.view.workers:
            self._metrics.workers.add_worker(worker.role.value)
            for rank in worker.ranks:
                self._metrics.workers.add_rank(
                    worker.worker_id,
                    dp_rank=rank.dp_rank,
                    num_running=rank.load.num_running,
                    num_waiting=rank.load.num_waiting,
                    num_pages=rank.load.num_pages,
                    num_free_pages=rank.load.num_free_pages,
                    num_quarantined_pages=rank.load.num_quarantined_pages,
                )

    async def _handshake(self, channel: Channel[WorkerToGateway]) -> _Connection | None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                join = await channel.receive()
            if not isinstance(join, Join):
                raise RemoteProtocolError(f"the first message is {type(join).__name__}", peer=channel.peer)
        except (TimeoutError, PeerLost, RemoteProtocolError) as error:
            if isinstance(error, RemoteProtocolError):
                self._metrics.observe_protocol_error()
            _log.warning("worker_handshake_failed peer=%s reason=%s", channel.peer, error)
            return None
        channel.peer = join.worker_id
        now_ns = self._clock.now_ns()
        changes = self._registry.join(join, now_ns)
        if isinstance(changes, Refused):
            _log.warning("worker_refused peer=%s reason=%s", join.worker_id, changes.message)
            channel.send(JoinRefused(message=changes.message))
            self._num_refused += join.role is not Role.PREFILL
            return None
        if join.role is not Role.PREFILL:
            self._num_refused = 0
        heartbeat_ns = seconds_to_ns(join.lease_s / HEARTBEATS_A_LEASE)
        connection = _Connection(
            channel, join.worker_id, join.incarnation, join.role, heartbeat_ns, now_ns + heartbeat_ns
        )
        replaced = self._connections.get(join.worker_id)
        self._connections[join.worker_id] = connection
        if replaced is not None:
            self._close_later(replaced)
        channel.send(Welcome(incarnation=self.incarnation, heartbeat_s=join.lease_s / HEARTBEATS_A_LEASE))
        self._apply(changes)
        return connection

    def _handle(self, connection: _Connection, message: WorkerToGateway) -> None:
        if isinstance(message, Join):
            raise RemoteProtocolError("a second Join on one connection", peer=connection.worker_id)
        current = self._connections.get(connection.worker_id) is connection
        if not current or message.sender != connection.incarnation:
            self._metrics.observe_stale(type(message).__name__)
            return
        stale_before = self._dispatcher.num_stale
        match message:
            case WorkerHeartbeat():
                self._registry.heartbeat(connection.worker_id, message, self._clock.now_ns())
            case Generated():
                self._perform(self._dispatcher.generated(connection.worker_id, message))
            case Failed():
                self._perform(self._dispatcher.failed(connection.worker_id, message, self._clock.now_ns()))
            case Leave():
                self._leave(connection, LeaveReason.SAID_SO)
            case _:
                assert_never(message)
        for _ in range(self._dispatcher.num_stale - stale_before):
            self._metrics.observe_stale(type(message).__name__)

    def _leave(self, connection: _Connection, reason: LeaveReason) -> None:
        self._apply(self._registry.leave(connection.worker_id, connection.incarnation, reason))

    def _apply(self, changes: Iterable[Joined | Left]) -> None:
        """Follow changes of the registry: close what left, move its requests, tell decode workers who prefills."""
        pool_changed = False
        for change in changes:
            worker = change.worker
            pool_changed |= worker.role is not Role.BOTH
            match change:
                case Joined():
                    _log.info(
                        "worker_joined peer=%s role=%s num_ranks=%d url=%s",
                        worker.worker_id,
                        worker.role.value,
                        len(worker.ranks),
                        worker.url,
                    )
                case Left():
                    level = logging.INFO if change.reason is LeaveReason.SAID_SO else logging.WARNING
                    _log.log(level, "worker_left peer=%s reason=%s", worker.worker_id, change.reason.value)
                    if change.reason is not LeaveReason.REPLACED:
                        self._close_later(self._connections.pop(worker.worker_id))
                    self._perform(self._dispatcher.worker_left(worker, self._clock.now_ns()))
                case _:
                    assert_never(change)
        if pool_changed:
            self._announce_prefill_pool()

    def _announce_prefill_pool(self) -> None:
        pool = PrefillPool(members=tuple(prefill_target(worker) for worker in self.view.prefilling()))
        for connection in list(self._connections.values()):
            if connection.role is Role.DECODE:
                self._send(connection, pool)

    def _perform(self, actions: list[Action]) -> None:
        """Carry out actions in order, and those that follow from a connection that turns out to be lost."""
        outstanding = deque(actions)
        while outstanding:
            action = outstanding.popleft()
            match action:
                case Send(worker_id, message):
                    connection = self._connections.get(worker_id)
                    if connection is not None:
                        self._send(connection, message)
                case Deliver(request_id, delta):
                    stream = self._streams.get(request_id)
                    if stream is not None and not stream.put(delta):
                        stream.fail(CLIENT_TOO_SLOW)
                        outstanding.extend(self._dispatcher.cancel(request_id))
                case Fail(request_id, failure):
                    if request_id in self._streams:
                        self._streams[request_id].fail(failure)
                case _:
                    assert_never(action)

    def _send(self, connection: _Connection, message: Generate | Abort | PrefillPool | GatewayHeartbeat) -> None:
        """A connection that is lost ends in its own `serve_worker`, which then moves its requests."""
        with contextlib.suppress(PeerLost):
            connection.channel.send(message)

    def _close_later(self, connection: _Connection) -> None:
        task = asyncio.create_task(connection.channel.close(), name=f"close {connection.worker_id}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._on_tick(self._clock.now_ns())
            except Exception:
                _log.exception("gateway_tick_failed")

    def _on_tick(self, now_ns: int) -> None:
        if now_ns - self._last_tick_ns > STALL_NS:
            _log.warning("gateway_stalled duration_ms=%d", (now_ns - self._last_tick_ns) // NS_PER_MS)
            self._leases_hold_until_ns = now_ns + STALL_GRACE_NS
        self._last_tick_ns = now_ns
        if now_ns >= self._leases_hold_until_ns:
            self._apply(self._registry.expire(now_ns))
        self._perform(self._dispatcher.expire(now_ns))
        for connection in list(self._connections.values()):
            if connection.next_heartbeat_ns <= now_ns:
                connection.next_heartbeat_ns = now_ns + connection.heartbeat_ns
                self._send(connection, GatewayHeartbeat(sender=self.incarnation))

"""A worker's side of its connection to the gateway: as `pdserve.worker.gateway_link`, without sockets and tasks."""

from typing import TYPE_CHECKING

from pdserve.simulate.connection import End
from pdserve.units import NS_PER_MS, seconds_to_ns
from pdserve.wire.cluster import (
    Abort,
    Generate,
    Join,
    JoinRefused,
    Leave,
    PrefillPool,
    Welcome,
    WorkerHeartbeat,
)
from pdserve.wire.peer import PROTOCOL_VERSION, Message

if TYPE_CHECKING:
    from pdserve.simulate.worker import Worker

GATEWAY = "gateway"
RETRY_NS = 500 * NS_PER_MS
"""As `pdserve.worker.gateway_link`."""


class GatewayEnd:
    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._end: End | None = None
        self._is_welcome = False
        self._next_beat_ns = 0
        self.num_stale = 0
        """Messages for another incarnation (H4)."""

    def join(self) -> None:
        worker = self._worker
        worker.ground.control.dial(worker, GATEWAY, self._connected, self._retry)

    def tell(self, message: Message) -> None:
        if self._end is not None and self._is_welcome:
            self._end.send(message)

    def say_goodbye(self) -> None:
        self.tell(Leave(sender=self._worker.incarnation))

    def beat_soon(self) -> None:
        """There is news: the next heartbeat is due."""
        self._next_beat_ns = 0

    def on_time(self) -> None:
        worker, end = self._worker, self._end
        if end is None:
            return
        if end.is_silent_for(seconds_to_ns(worker.lease_s)):
            end.close()
        elif self._is_welcome and worker.now_ns >= self._next_beat_ns:
            self._next_beat_ns = worker.now_ns + seconds_to_ns(worker.heartbeat_s)
            core = worker.core
            end.send(
                WorkerHeartbeat(
                    sender=worker.incarnation,
                    loads=core.loads(),
                    num_prefill_peers=core.num_prefill_peers,
                    draining=core.is_draining,
                )
            )

    def on_message(self, message: Message) -> None:
        worker = self._worker
        match message:
            case Welcome():
                self._is_welcome = True
                self.beat_soon()
            case JoinRefused():
                if self._end is not None:
                    self._end.close()
            case Generate() | Abort() if message.receiver != worker.incarnation:
                self.num_stale += 1
            case Generate():
                for refusal in worker.core.on_generate(message, now_ns=worker.now_ns):
                    self.tell(refusal)
                worker.happened()
            case Abort():
                worker.core.on_abort(message.request_id, now_ns=worker.now_ns)
                worker.happened()
            case PrefillPool():
                worker.peers.set_members(message.members)
            case _:
                pass

    def _connected(self, end: End) -> None:
        worker = self._worker
        self._end, self._is_welcome = end, False
        end.on_message, end.on_end = self.on_message, self._lost
        end.send(
            Join(
                protocol_version=PROTOCOL_VERSION,
                worker_id=worker.core.identity.worker_id,
                incarnation=worker.incarnation,
                role=worker.shape.role,
                url=worker.name,
                model_name="hashes",
                model_fingerprint=worker.core.identity.model_fingerprint,
                max_model_len=worker.engines[0].info.max_model_len,
                lease_s=worker.lease_s,
                tensor_parallel_size=worker.shape.num_ranks,
                loads=worker.core.loads(),
            )
        )

    def _lost(self) -> None:
        self._end = None
        self._worker.core.abort_all(now_ns=self._worker.now_ns)
        self._worker.happened()
        self._retry()

    def _retry(self) -> None:
        self._worker.after(RETRY_NS, self.join)

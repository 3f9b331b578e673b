"""Both sides of the connections between decode and prefill workers: as `pdserve.worker.prefill_links` and
`decode_links`, with the same handshake, without sockets and tasks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.ids import Incarnation
from pdserve.kv.shard import KvSharding
from pdserve.simulate.connection import End
from pdserve.transfer.receiver import Receiver
from pdserve.transfer.sender import Sender
from pdserve.units import NS_PER_S, seconds_to_ns
from pdserve.wire.cluster import PrefillTarget
from pdserve.wire.peer import (
    Cancel,
    Grant,
    GrantRefused,
    HandoffStopped,
    Heartbeat,
    Message,
    PeerHello,
    PeerRefused,
    RankRegions,
)
from pdserve.worker.handshake import hello

if TYPE_CHECKING:
    from pdserve.simulate.worker import Worker

RETRY_NS = NS_PER_S
"""As `pdserve.worker.prefill_links`."""

HANDSHAKE_NS = 5 * NS_PER_S


@dataclass(slots=True, eq=False)
class Link:
    end: End
    peer: Incarnation
    regions: tuple[RankRegions, ...] = ()
    """Under keys for this peer, until it has accepted them."""
    sharding: KvSharding | None = None
    """The peer's, as it says itself."""
    is_joined: bool = False


class Peers(ABC):
    """The outbox of a worker, and its heartbeats."""

    def __init__(self, worker: "Worker") -> None:
        self.worker = worker
        self.links: dict[Incarnation, Link] = {}
        """Those that shook hands."""
        self._next_beat_ns = 0

    def send(self, peer: Incarnation, message: Message) -> None:
        if peer in self.links:
            self.links[peer].end.send(message)

    def drop(self, peer: Incarnation, why: str) -> None:
        del why
        if peer in self.links:
            self.links[peer].end.close()

    @abstractmethod
    def set_members(self, members: tuple[PrefillTarget, ...]) -> None:
        """What the gateway says of who prefills."""

    @abstractmethod
    def on_message(self, link: Link, message: Message) -> None:
        """What came over a connection."""

    def on_time(self) -> None:
        """Heartbeats, and the leases of the peers."""
        now_ns = self.worker.now_ns
        lease_ns = seconds_to_ns(self.worker.lease_s)
        for link in list(self.links.values()):
            if link.end.is_silent_for(lease_ns):
                link.end.close()
        if now_ns >= self._next_beat_ns:
            self._next_beat_ns = now_ns + seconds_to_ns(self.worker.heartbeat_s)
            for peer, link in self.links.items():
                link.end.send(Heartbeat(sender=self.worker.incarnation, receiver=peer))

    def hello(self, *, regions: tuple[RankRegions, ...] = ()) -> PeerHello:
        worker = self.worker
        return hello(worker.core.identity, worker.settings, worker.fabric, regions=regions)


class PeerServer(Peers):
    """Of a prefill worker: decode workers dial it."""

    def __init__(self, worker: "Worker", sender: Sender) -> None:
        super().__init__(worker)
        self._sender = sender
        worker.ground.control.listeners[worker.name] = (worker, self._accept)

    def set_members(self, members: tuple[PrefillTarget, ...]) -> None:
        """Nothing: a prefill worker is not told, and waits to be dialled."""

    def on_message(self, link: Link, message: Message) -> None:
        worker, role = self.worker, self.worker.core.prefill
        assert role is not None
        match message:
            case PeerHello():
                self._join(link, message)
            case Grant():
                role.on_grant(link.peer, message, now_ns=worker.now_ns)
            case Cancel():
                role.on_cancel(link.peer, message, now_ns=worker.now_ns)
            case _:
                return
        worker.happened()

    def _accept(self, end: End) -> None:
        link = Link(end, Incarnation(0))
        end.on_message = lambda message: self.on_message(link, message)
        end.on_end = lambda: self._lost(link)
        end.send(self.hello())
        self.worker.after(HANDSHAKE_NS, lambda: None if link.is_joined else end.close())

    def _join(self, link: Link, theirs: PeerHello) -> None:
        if theirs.incarnation in self.links or self._sender.is_connected(theirs.incarnation):
            link.end.send(PeerRefused(field="connection", ours="open", theirs="second"))
            link.end.close()
            return
        self._sender.peer_joined(theirs)
        link.peer, link.is_joined = theirs.incarnation, True
        self.links[theirs.incarnation] = link
        link.end.send(Heartbeat(sender=self.worker.incarnation, receiver=theirs.incarnation))

    def _lost(self, link: Link) -> None:
        if self.links.get(link.peer) is link:
            del self.links[link.peer]
            self.worker.core.peer_lost(link.peer, now_ns=self.worker.now_ns)
            self.worker.happened()


class PeerLinks(Peers):
    """Of a decode worker: it keeps a connection to each prefill worker that the gateway names."""

    def __init__(self, worker: "Worker", receiver: Receiver) -> None:
        super().__init__(worker)
        self._receiver = receiver
        self._wanted: dict[Incarnation, PrefillTarget] = {}
        self._dialling: dict[Incarnation, End | None] = {}
        """Where a connection is being made, or a handshake goes on."""

    def set_members(self, members: tuple[PrefillTarget, ...]) -> None:
        """Connect to new ones, leave those that are gone."""
        self._wanted, before = {target.incarnation: target for target in members}, self._wanted
        for incarnation in before.keys() - self._wanted.keys():
            if incarnation in self.links:
                self.links[incarnation].end.close()
            end = self._dialling.get(incarnation)
            if end is not None:
                end.close()
        for incarnation in self._wanted.keys() - before.keys():
            self._keep(incarnation)

    def on_message(self, link: Link, message: Message) -> None:
        worker = self.worker
        match message:
            case PeerHello():
                self._hear(link, message)
            case Heartbeat() if not link.is_joined:
                self._join(link)
            case GrantRefused() | HandoffStopped():
                self._receiver.on_message(link.peer, message, now_ns=worker.now_ns)
                worker.core.advance(now_ns=worker.now_ns)
                worker.happened()
            case PeerRefused():
                link.end.close()
            case _:
                pass

    def _keep(self, incarnation: Incarnation) -> None:
        """Connect, if the last session of this incarnation is fenced; look again in a while (H2)."""
        target = self._wanted.get(incarnation)
        if target is None:
            return
        is_free = incarnation not in self.links and incarnation not in self._dialling
        if is_free and self._receiver.can_join(incarnation):
            self._dialling[incarnation] = None
            self.worker.ground.control.dial(
                self.worker,
                target.url,
                lambda end: self._connected(incarnation, end),
                lambda: self._give_up(incarnation),
            )
        elif is_free:
            self._look_again(incarnation)

    def _look_again(self, incarnation: Incarnation) -> None:
        self.worker.after(RETRY_NS, lambda: self._keep(incarnation))

    def _give_up(self, incarnation: Incarnation) -> None:
        self._dialling.pop(incarnation, None)
        self._look_again(incarnation)

    def _connected(self, incarnation: Incarnation, end: End) -> None:
        link = Link(end, incarnation)
        self._dialling[incarnation] = end
        end.on_message = lambda message: self.on_message(link, message)
        end.on_end = lambda: self._lost(link)
        if incarnation not in self._wanted:
            end.close()
        self.worker.after(HANDSHAKE_NS, lambda: None if link.is_joined else end.close())

    def _hear(self, link: Link, theirs: PeerHello) -> None:
        if theirs.incarnation != link.peer:
            link.end.close()
            return
        link.regions, link.sharding = self._receiver.expose(), theirs.sharding
        link.end.send(self.hello(regions=link.regions))

    def _join(self, link: Link) -> None:
        assert link.sharding is not None
        self._receiver.peer_joined(
            worker_id=self._wanted[link.peer].worker_id,
            incarnation=link.peer,
            sharding=link.sharding,
            regions=link.regions,
        )
        link.is_joined = True
        del self._dialling[link.peer]
        self.links[link.peer] = link
        self.worker.gateway.beat_soon()
        self.worker.happened()

    def _lost(self, link: Link) -> None:
        """What has landed is counted first: a prefill worker that drains leaves then."""
        worker = self.worker
        if self.links.get(link.peer) is link:
            del self.links[link.peer]
            worker.core.on_fabric_events(worker.fabric.poll(), now_ns=worker.now_ns)
            worker.core.peer_lost(link.peer, now_ns=worker.now_ns)
            worker.gateway.beat_soon()
            worker.happened()
            self._look_again(link.peer)
        elif link.end is self._dialling.get(link.peer):
            self._receiver.withdraw(link.regions)
            self._give_up(link.peer)

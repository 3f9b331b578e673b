"""The control connections of a worker to its peers, by the peer's incarnation: sending, heartbeats, the end of each."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from pdserve.clock import Clock
from pdserve.errors import PdserveError, PeerLost
from pdserve.ids import Incarnation
from pdserve.wire.channel import Channel
from pdserve.wire.peer import DecodeToPrefill, Heartbeat, Message, PrefillToDecode

_log = logging.getLogger(__name__)

PeerChannel = Channel[DecodeToPrefill] | Channel[PrefillToDecode]
T = TypeVar("T")


class Connections:
    """The `Outbox` of both roles. Threads: the event loop's only."""

    def __init__(self, *, incarnation: Incarnation, clock: Clock) -> None:
        self._incarnation = incarnation
        self._clock = clock
        self._channels: dict[Incarnation, PeerChannel] = {}
        self._since_ns: dict[Incarnation, int] = {}

    def __contains__(self, peer: Incarnation) -> bool:
        return peer in self._channels

    def add(self, peer: Incarnation, channel: PeerChannel) -> None:
        self._channels[peer] = channel
        self._since_ns[peer] = self._clock.now_ns()

    def remove(self, peer: Incarnation) -> None:
        self._channels.pop(peer, None)
        self._since_ns.pop(peer, None)

    @property
    def since_ns(self) -> Mapping[Incarnation, int]:
        """When each connection was made; follows what comes and goes."""
        return MappingProxyType(self._since_ns)

    def send(self, peer: Incarnation, message: Message) -> None:
        """Queue a message; one to a peer that is gone is dropped: its end is on the way to the roles already."""
        channel = self._channels.get(peer)
        if channel is None:
            return
        try:
            channel.send(message)
        except PeerLost as error:
            _log.debug("send_failed peer=%s error=%s", channel.peer, error.message)

    def drop(self, peer: Incarnation, why: str) -> None:
        """Close a connection; whoever reads from it sees the end and tells the roles."""
        channel = self._channels.get(peer)
        if channel is not None:
            _log.warning("peer_dropped peer=%s reason=%r", channel.peer, why)
            channel.abort()

    async def beat(self, peer: Incarnation, *, every_s: float) -> None:
        """Send heartbeats until cancelled."""
        while True:
            self.send(peer, Heartbeat(sender=self._incarnation, receiver=peer))
            await asyncio.sleep(every_s)


async def receive_within(channel: Channel[T], *, timeout_s: float) -> T:
    """The next message. Raises: `PeerLost` when none comes in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await channel.receive()
    except TimeoutError as error:
        raise PeerLost(f"{channel.peer} was silent for {timeout_s:g} s", peer=channel.peer) from error


async def serve_peer(
    connections: Connections,
    channel: Channel[T],
    *,
    peer: Incarnation,
    heartbeat_s: float,
    lease_s: float,
    on_message: Callable[[T], None],
) -> None:
    """Read messages until the connection ends or the peer is silent for its lease; never raises for the peer's sake."""
    beats = asyncio.create_task(connections.beat(peer, every_s=heartbeat_s))
    try:
        while True:
            on_message(await receive_within(channel, timeout_s=lease_s))
    except PdserveError as error:
        _log.info("peer_lost peer=%s reason=%r", channel.peer, error.message)
    finally:
        beats.cancel()
        channel.abort()

"""One rank process, as the main process sees it: frames to and from it, its regions, and how it ended. Torch-free."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pdserve.config.environment import child_environment
from pdserve.engine.rank_protocol import (
    LENGTH_BYTES,
    MAX_REGIONS,
    RankFailed,
    RankReply,
    StartRefused,
    frame_length,
    reply_decoder,
)
from pdserve.engine.region import Region
from pdserve.errors import ConfigError, InternalError
from pdserve.shared_region import SharedRegion

_EXIT_TIMEOUT_S = 5.0
"""From the end of the file to the end of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How a rank ended: what it said last, if anything, and what the kernel says of the process."""

    rank: int
    pid: int
    last_words: StartRefused | RankFailed | None
    exit_status: int | None
    """As of `subprocess`: negative for a signal; None when the process closed its socket and lives on."""

    @property
    def lost_peer(self) -> bool:
        """Whether it ended because another rank was gone."""
        return isinstance(self.last_words, RankFailed) and self.last_words.lost_peer

    def __str__(self) -> str:
        if isinstance(self.last_words, RankFailed):
            return f"rank {self.rank} (process {self.pid}) failed: {self.last_words.message}"
        if self.exit_status is None:
            return f"rank {self.rank} (process {self.pid}) closed its socket, but is alive"
        if self.exit_status < 0:
            return f"rank {self.rank} (process {self.pid}) ended by {signal.Signals(-self.exit_status).name}"
        return f"rank {self.rank} (process {self.pid}) ended with exit code {self.exit_status}"


class RankProcess:
    """Lifetime: regions are mapped until `close`, which ends the process."""

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        process: asyncio.subprocess.Process,
        *,
        map_kv: Callable[[int], Region],
    ) -> None:
        """`map_kv` maps the KV region of this descriptor."""
        self.rank = rank
        self.pid = process.pid
        self.kv_region: Region | None = None
        """None until the rank is ready."""
        self.lead_regions: tuple[SharedRegion, ...] = ()
        self._map_kv = map_kv
        self._socket = connection
        self._process = process
        # A rank answers what it is asked, so more than one reply is never underway.
        self._replies: asyncio.Queue[RankReply] = asyncio.Queue(maxsize=1)
        self.end = asyncio.create_task(self._listen())

    @classmethod
    async def spawn(
        cls, rank: int, *, num_threads: int, inherited_fds: tuple[int, ...], map_kv: Callable[[int], Region]
    ) -> "RankProcess":
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pdserve.engine.rank",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(), *inherited_fds),
                stdin=asyncio.subprocess.DEVNULL,
                # Ranks of one engine are on one machine, and nobody else's business.
                env=child_environment(OMP_NUM_THREADS=str(num_threads), GLOO_SOCKET_IFNAME="lo"),
            )
            undo.pop_all()
        return cls(rank, ours, process, map_kv=map_kv)

    async def ask(self, frame: bytes) -> RankReply:
        """The answer to one request. Never returns once the rank has ended: wait for `end` too."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await asyncio.get_running_loop().sock_sendall(self._socket, frame)
        return await self._replies.get()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """The rank exits when it sees the end of the file; what does not within the deadline is killed.

        Requires: no views of the regions are left.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            await asyncio.wait_for(self._process.wait(), _EXIT_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        await self.end
        self._socket.close()
        for region in (self.kv_region, *self.lead_regions):
            if region is not None:
                region.close()

    async def _listen(self) -> RankEnd:
        """Takes replies in until the rank ends."""
        last_words = None
        try:
            reply = await self._receive(await self._receive_regions())
            while not isinstance(reply, StartRefused | RankFailed):
                self._replies.put_nowait(reply)
                reply = await self._receive(b"")
            last_words = reply
        except (EOFError, ConnectionResetError):
            pass
        except ConfigError as error:
            last_words = StartRefused(message=error.message)
            self.kill()
        except (InternalError, msgspec.DecodeError, asyncio.QueueFull) as error:
            last_words = RankFailed(message=f"it broke the protocol: {error!r}", lost_peer=False)
            self.kill()
        try:
            exit_status = await asyncio.wait_for(self._process.wait(), _EXIT_TIMEOUT_S)
        except TimeoutError:
            exit_status = None
        return RankEnd(rank=self.rank, pid=self.pid, last_words=last_words, exit_status=exit_status)

    async def _receive_regions(self) -> bytes:
        """Maps the regions that come with the first reply; returns the bytes that came with them."""
        await self._readable()
        received, fds, _, _ = socket.recv_fds(self._socket, LENGTH_BYTES, MAX_REGIONS)
        if fds:
            self.lead_regions = tuple(SharedRegion.from_fd(fd) for fd in fds[1:])
            self.kv_region = self._map_kv(fds[0])
        return received

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(self._socket, lambda: readable.done() or readable.set_result(None))
        try:
            await readable
        finally:
            loop.remove_reader(self._socket)

    async def _receive(self, received: bytes) -> RankReply:
        header = received + await self._receive_exactly(LENGTH_BYTES - len(received))
        return reply_decoder.decode(await self._receive_exactly(frame_length(header)))

    async def _receive_exactly(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            piece = await asyncio.get_running_loop().sock_recv(self._socket, num_bytes - len(received))
            if not piece:
                raise EOFError
            received += piece
        return bytes(received)

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
    MAX_REGIONS,
    RankFailed,
    RankReply,
    StartRefused,
    reply_decoder,
    take_frames,
)
from pdserve.engine.rank_regions import RankRegions, RegionsToMap
from pdserve.errors import ConfigError, InternalError

_EXIT_TIMEOUT_S = 5.0
"""From the end of the file to the end of the process."""
_RECEIVE_BYTES = 64 * 1024
"""More than most replies: 12 bytes for each sampled token."""


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
        regions_to_map: RegionsToMap,
        on_reply: Callable[[int, RankReply], None],
    ) -> None:
        """`on_reply` takes all that the rank says but its last words."""
        self.rank = rank
        self.pid = process.pid
        self.regions: RankRegions | None = None
        """None until the rank is ready."""
        self._regions_to_map = regions_to_map
        self._on_reply = on_reply
        self._socket = connection
        self._process = process
        self._received = bytearray()
        loop = asyncio.get_running_loop()
        self._last_words: asyncio.Future[StartRefused | RankFailed | None] = loop.create_future()
        loop.add_reader(connection, self._read)
        self.end = asyncio.create_task(self._ended())

    @classmethod
    async def spawn(
        cls,
        rank: int,
        *,
        num_threads: int,
        inherited_fds: tuple[int, ...],
        regions_to_map: RegionsToMap,
        on_reply: Callable[[int, RankReply], None],
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
        return cls(rank, ours, process, regions_to_map=regions_to_map, on_reply=on_reply)

    async def send(self, frame: bytes) -> None:
        """What is sent to a rank that has ended is lost: `end` says so."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await asyncio.get_running_loop().sock_sendall(self._socket, frame)

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """Ends the process and unmaps the regions. Requires: no views of them are left."""
        self.kill()
        await self.end
        self._socket.close()
        if self.regions is not None:
            self.regions.close()

    def _read(self) -> None:
        """Takes in what lies in the socket; the last thing to be read are the last words, or the end of the file."""
        try:
            piece, fds, _, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, MAX_REGIONS)
            if fds:
                self.regions = self._regions_to_map.map(fds)
            self._received += piece
            for payload in take_frames(self._received):
                reply = reply_decoder.decode(payload)
                if isinstance(reply, StartRefused | RankFailed):
                    self._stop_reading(reply)
                    return
                self._on_reply(self.rank, reply)
            if not piece:
                self._stop_reading(None)
        except BlockingIOError:
            return
        except ConnectionResetError:
            self._stop_reading(None)
        except ConfigError as error:
            self.kill()
            self._stop_reading(StartRefused(message=error.message))
        except (InternalError, msgspec.DecodeError, OSError) as error:
            self.kill()
            self._stop_reading(RankFailed(message=f"what it said is lost: {error!r}", lost_peer=False))

    def _stop_reading(self, last_words: StartRefused | RankFailed | None) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._last_words.set_result(last_words)

    async def _ended(self) -> RankEnd:
        last_words = await self._last_words
        try:
            exit_status = await asyncio.wait_for(self._process.wait(), _EXIT_TIMEOUT_S)
        except TimeoutError:
            exit_status = None
        return RankEnd(rank=self.rank, pid=self.pid, last_words=last_words, exit_status=exit_status)

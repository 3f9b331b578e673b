"""The worker's end of an engine: starts the rank process and runs passes on it. Torch-free."""

import asyncio
import signal
import socket
import sys

import msgspec

from pdserve.config.environment import child_environment
from pdserve.engine.port import EngineInfo, EngineSpec
from pdserve.engine.rank_protocol import (
    LENGTH_BYTES,
    NUM_REGIONS,
    PassDone,
    PassFailed,
    RankReady,
    RankReply,
    RankRequest,
    RankStart,
    RunPass,
    StartRefused,
    encode_frame,
    frame_length,
    reply_decoder,
)
from pdserve.errors import ConfigError, InternalError
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.shared_region import SharedRegion

_START_TIMEOUT_S = 600.0
"""A 70B model read from a slow disk takes minutes."""
_PASS_TIMEOUT_S = 300.0
"""A pass over 8,192 tokens takes 40 s on a slow core; what needs longer than this hangs."""
_CLOSE_TIMEOUT_S = 5.0


async def start_engine(spec: EngineSpec) -> "RankEngine":
    """An engine whose rank has loaded the model.

    Raises: `ConfigError` when the spec can't be done, `InternalError` when the rank died while starting.
    Cost: seconds; the model is read from disk.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pdserve.engine.rank",
            str(theirs.fileno()),
            pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL,
            env=child_environment(OMP_NUM_THREADS=str(spec.num_threads)),
        )
    connection = _RankConnection(ours, process)
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            await connection.send(RankStart(spec=spec))
            reply, fds = await connection.receive_with_fds()
        info = _started_info(reply)
        return RankEngine(connection, info, [SharedRegion.from_fd(fd) for fd in fds])
    except TimeoutError:
        await connection.close()
        raise InternalError(f"the rank process did not load {spec.model_dir} in {_START_TIMEOUT_S:.0f} s") from None
    except BaseException:
        await connection.close()
        raise


def _started_info(reply: RankReply) -> EngineInfo:
    match reply:
        case RankReady(info=info):
            return info
        case StartRefused(message=message):
            raise ConfigError(message)
        case PassFailed(message=message):
            raise InternalError(f"the rank process failed while starting: {message}")
        case PassDone():
            raise InternalError("the rank process answered a start with a pass")


class RankEngine:
    """Implements `pdserve.engine.port.Engine`. Once a pass has failed, every later one does."""

    def __init__(self, connection: "_RankConnection", info: EngineInfo, regions: list[SharedRegion]) -> None:
        self._connection = connection
        self.info = info
        self.kv_region, self.tail_region, self.counter_region = regions
        self._failure: str | None = None
        self._is_running = False

    async def run(self, batch: Batch) -> BatchResult:
        """Raises: `InternalError` when the rank died or failed, or while another pass is running."""
        if self._is_running:
            raise InternalError(f"pass {batch.pass_index} came while another pass was running")
        if self._failure is not None:
            raise InternalError(self._failure)
        self._is_running = True
        # Until the reply is here: an exception, or a cancellation, leaves the conversation in an unknown state.
        self._failure = f"pass {batch.pass_index} was abandoned"
        try:
            result = await self._exchange(batch)
        except InternalError as error:
            self._failure = error.message
            raise
        finally:
            self._is_running = False
        self._failure = None
        return result

    async def _exchange(self, batch: Batch) -> BatchResult:
        try:
            async with asyncio.timeout(_PASS_TIMEOUT_S):
                await self._connection.send(RunPass(batch=batch))
                reply = await self._connection.receive()
        except TimeoutError:
            raise InternalError(f"pass {batch.pass_index} did not end in {_PASS_TIMEOUT_S:.0f} s") from None
        match reply:
            case PassDone(result=result):
                return result
            case PassFailed(message=message):
                raise InternalError(f"pass {batch.pass_index} failed in the rank process: {message}")
            case RankReady() | StartRefused():
                raise InternalError(f"the rank process answered pass {batch.pass_index} with a start")

    async def close(self) -> None:
        """Ends the rank and unmaps the regions. Requires: no views of their buffers are left."""
        self._failure = "the engine is closed"
        await self._connection.close()
        for region in (self.kv_region, self.tail_region, self.counter_region):
            region.close()


class _RankConnection:
    """Frames to and from one rank process, and the process itself."""

    def __init__(self, connection: socket.socket, process: asyncio.subprocess.Process) -> None:
        self._socket = connection
        self._process = process

    async def send(self, request: RankRequest) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, encode_frame(request))
        except (BrokenPipeError, ConnectionResetError):
            raise await self._death() from None

    async def receive(self) -> RankReply:
        return await self._receive_rest(b"")

    async def receive_with_fds(self) -> tuple[RankReply, list[int]]:
        """A reply that may carry the regions' descriptors; the caller owns them."""
        await self._readable()
        received, fds, _, _ = socket.recv_fds(self._socket, LENGTH_BYTES, NUM_REGIONS)
        reply = await self._receive_rest(received)
        if isinstance(reply, RankReady) and len(fds) != NUM_REGIONS:
            raise InternalError(f"the rank process sent {len(fds)} regions instead of {NUM_REGIONS}")
        return reply, fds

    async def close(self) -> None:
        """The rank exits when it sees the end of the file; what does not within the deadline is killed."""
        self._socket.close()
        try:
            await asyncio.wait_for(self._process.wait(), _CLOSE_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(self._socket, lambda: readable.done() or readable.set_result(None))
        try:
            await readable
        finally:
            loop.remove_reader(self._socket)

    async def _receive_rest(self, received: bytes) -> RankReply:
        header = received + await self._receive_exactly(LENGTH_BYTES - len(received))
        payload = await self._receive_exactly(frame_length(header))
        try:
            return reply_decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise InternalError(f"the rank process sent a broken reply: {error}") from error

    async def _receive_exactly(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            try:
                piece = await asyncio.get_running_loop().sock_recv(self._socket, num_bytes - len(received))
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise await self._death()
            received += piece
        return bytes(received)

    async def _death(self) -> InternalError:
        """What became of the process whose end of the socket is closed."""
        try:
            status = await asyncio.wait_for(self._process.wait(), _CLOSE_TIMEOUT_S)
        except TimeoutError:
            return InternalError(f"the rank process {self._process.pid} closed its socket, but is alive")
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit code {status}"
        return InternalError(f"the rank process {self._process.pid} ended {how}")

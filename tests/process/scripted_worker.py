"""A worker that speaks the real protocol over a real socket and answers by a script."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import aiohttp

from pdserve.config.role import Role
from pdserve.errors import PeerLost
from pdserve.ids import Incarnation, WorkerId
from pdserve.sampling import TokenLogprobs
from pdserve.wire.channel import Channel, dial
from pdserve.wire.cluster import (
    Abort,
    Delta,
    Failed,
    FailureKind,
    FinishReason,
    GatewayHeartbeat,
    GatewayToWorker,
    Generate,
    Generated,
    Join,
    JoinRefused,
    Load,
    PrefillPlace,
    PrefillPool,
    TokenEntry,
    Welcome,
    WorkerHeartbeat,
)
from pdserve.wire.codec import worker_codec
from pdserve.wire.peer import PROTOCOL_VERSION

Script = Callable[["ScriptedWorker", Generate], Awaitable[None]]

DEFAULT_LOAD = Load(num_free_pages=100, num_pages=100)


class ScriptedWorker:
    """What it received lies in queues, so that a test can wait for it."""

    def __init__(self, channel: Channel[GatewayToWorker], join: Join, welcome: Welcome, script: Script) -> None:
        self.channel = channel
        self.worker_id = join.worker_id
        self.incarnation = join.incarnation
        self.welcome = welcome
        self.loads = join.loads
        self.num_prefill_peers = 0
        self.generates: asyncio.Queue[Generate] = asyncio.Queue()
        self.aborts: asyncio.Queue[Abort] = asyncio.Queue()
        self.pools: asyncio.Queue[PrefillPool] = asyncio.Queue()
        self.gateway_heartbeats: asyncio.Queue[GatewayHeartbeat] = asyncio.Queue()
        self.disconnected = asyncio.Event()
        self.beats = True
        self._script = script
        self._tasks = {asyncio.create_task(self._read()), asyncio.create_task(self._beat())}

    def deltas(self, *deltas: Delta, sender: Incarnation | None = None) -> None:
        self.channel.send(Generated(sender=sender or self.incarnation, deltas=deltas))

    def fail(
        self, generate: Generate, kind: FailureKind, message: str = "scripted", retry_after_s: float | None = None
    ) -> None:
        self.channel.send(
            Failed(
                sender=self.incarnation,
                request_id=generate.request_id,
                kind=kind,
                message=message,
                retry_after_s=retry_after_s,
            )
        )

    def heartbeat(self, *loads: Load, num_prefill_peers: int = 0, sender: Incarnation | None = None) -> None:
        """A load for each rank; later heartbeats repeat them."""
        self.loads = loads
        self.num_prefill_peers = num_prefill_peers
        self.channel.send(
            WorkerHeartbeat(sender=sender or self.incarnation, loads=loads, num_prefill_peers=num_prefill_peers)
        )

    def die(self) -> None:
        """As the kernel ends a killed process's connections."""
        self.channel.abort()

    async def leave(self) -> None:
        await self.channel.close()
        for task in self._tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception) and not isinstance(outcome, PeerLost):
                raise outcome

    async def _read(self) -> None:
        with contextlib.suppress(PeerLost):
            while True:
                message = await self.channel.receive()
                if isinstance(message, Generate):
                    self.generates.put_nowait(message)
                    self._tasks.add(asyncio.create_task(self._run_script(message)))
                elif isinstance(message, Abort):
                    self.aborts.put_nowait(message)
                elif isinstance(message, PrefillPool):
                    self.pools.put_nowait(message)
                elif isinstance(message, GatewayHeartbeat):
                    self.gateway_heartbeats.put_nowait(message)
        self.disconnected.set()

    async def _run_script(self, generate: Generate) -> None:
        with contextlib.suppress(PeerLost):
            await self._script(self, generate)

    async def _beat(self) -> None:
        with contextlib.suppress(PeerLost):
            while True:
                await asyncio.sleep(self.welcome.heartbeat_s / 2)
                if self.beats:
                    self.heartbeat(*self.loads, num_prefill_peers=self.num_prefill_peers)


def join_message(
    worker_id: str,
    *,
    role: Role = Role.DECODE,
    incarnation: int = 1,
    model_name: str = "smol",
    model_fingerprint: str = "f1",
    max_model_len: int = 256,
    lease_s: float = 2.0,
    loads: tuple[Load, ...] = (DEFAULT_LOAD,),
) -> Join:
    return Join(
        protocol_version=PROTOCOL_VERSION,
        worker_id=WorkerId(worker_id),
        incarnation=Incarnation(incarnation),
        role=role,
        url=f"http://worker-{worker_id}:8101",
        model_name=model_name,
        model_fingerprint=model_fingerprint,
        max_model_len=max_model_len,
        lease_s=lease_s,
        tensor_parallel_size=1,
        loads=loads,
    )


async def shake_hands(
    session: aiohttp.ClientSession,
    gateway_url: str,
    join: Join,
    *,
    secret: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> tuple[Channel[GatewayToWorker], GatewayToWorker]:
    """The channel and the gateway's answer to `join`."""
    channel = await dial(session, f"{gateway_url}/cluster", worker_codec(), secret=secret, timeout_s=5.0, tls=tls)
    channel.send(join)
    return channel, await asyncio.wait_for(channel.receive(), 5.0)


@asynccontextmanager
async def joined(
    gateway_url: str,
    join: Join,
    script: Script | None = None,
    *,
    secret: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncGenerator[ScriptedWorker]:
    """A worker that has joined; it leaves at the end."""
    async with aiohttp.ClientSession() as session:
        channel, answer = await shake_hands(session, gateway_url, join, secret=secret, tls=tls)
        assert isinstance(answer, Welcome), answer.message if isinstance(answer, JoinRefused) else answer
        worker = ScriptedWorker(channel, join, answer, script or answering(["Hello", " world"]))
        try:
            yield worker
        finally:
            await worker.leave()


def answering(
    texts: Sequence[str],
    *,
    finish_reason: FinishReason = FinishReason.STOP,
    place: PrefillPlace = PrefillPlace.REMOTE,
) -> Script:
    """One delta a text and choice, each of one token; the last ones finish. The logprobs of a prompt come first."""

    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        wants_prompt = generate.sampling.num_prompt_logprobs is not None
        if wants_prompt:
            worker.deltas(prompt_delta(generate, place))
        for index, text in enumerate(texts):
            for choice_index in range(generate.num_choices):
                worker.deltas(
                    Delta(
                        request_id=generate.request_id,
                        choice_index=choice_index,
                        token_ids=(index,),
                        text=text,
                        finish_reason=finish_reason if index == len(texts) - 1 else None,
                        prefill=place if index == choice_index == 0 and not wants_prompt else None,
                    )
                )
            await asyncio.sleep(0)

    return script


def prompt_delta(generate: Generate, place: PrefillPlace) -> Delta:
    """The logprob of each prompt token from the second on is minus its position."""
    entries = [
        TokenLogprobs(token_id=token_id, logprob=-float(position), top=())
        for position, token_id in enumerate(generate.prompt_token_ids)
    ]
    return Delta(
        request_id=generate.request_id, token_ids=(), text="", prompt_logprobs=tuple(entries[1:]), prefill=place
    )


def starting(texts: Sequence[str]) -> Script:
    """As `answering`, with logprobs, but it never finishes."""
    entry = TokenEntry(text_offset=0, logprobs=TokenLogprobs(token_id=1, logprob=-1.0, top=()))

    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        for text in texts:
            worker.deltas(Delta(request_id=generate.request_id, token_ids=(1,), text=text, entries=(entry,)))

    return script


def refusing(kind: FailureKind, *, retry_after_s: float | None = None) -> Script:
    async def script(worker: ScriptedWorker, generate: Generate) -> None:
        worker.fail(generate, kind, retry_after_s=retry_after_s)

    return script


async def silent(worker: ScriptedWorker, generate: Generate) -> None:
    """Takes the request and says nothing."""


async def dying(worker: ScriptedWorker, generate: Generate) -> None:
    worker.die()

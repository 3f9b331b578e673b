"""Chats that each wait for their answer before they go on, and a long prompt from time to time."""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from typing import Protocol

import aiohttp
import msgspec

from pdserve.bench.api_client import Answer
from pdserve.bench.load.prompts import Prompts
from pdserve.bench.load.target import ORDINARY_TOKEN_IDS
from pdserve.errors import PdserveError
from pdserve.units import NS_PER_S, ns_to_seconds
from pdserve.workload.request import WorkloadRequest

ANSWER_DEADLINE_S = 120.0
LONG_INDEX = 1_000_000
"""From here on the prompts are the long ones'; those of the chats are below, and no two are alike."""
CHAT_STRIDE = 10_000


class Kind(Enum):
    CHAT = "chat"
    LONG = "long"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float = 75.0
    num_chats: int = 4
    chat_prompt_tokens: int = 64
    chat_output_tokens: int = 60
    long_first_s: float = 5.0
    long_every_s: float = 15.0
    long_prompt_tokens: tuple[int, int] = (1500, 2000)
    """The least and the most."""
    long_output_tokens: int = 60


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it. Instants are seconds since the load's start."""

    kind: Kind
    sent_s: float
    num_prompt_tokens: int
    token_s: tuple[float, ...]
    error: str | None


class Route(Protocol):
    async def stream(self, body: dict[str, object], answer: Answer) -> None:
        """Ask for a completion, and fill `answer` as its tokens come. Raises: `PdserveError`."""
        ...


@asynccontextmanager
async def unlimited_session() -> AsyncGenerator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield session


class ChatLoad:
    """Lifetime: one `run`."""

    def __init__(self, load: Load, route: Route, *, seed: int) -> None:
        self._load = load
        self._route = route
        self._prompts = Prompts(ORDINARY_TOKEN_IDS, seed=seed)
        self._lengths = random.Random(seed)
        self._start_ns = 0
        self.exchanges: list[Exchange] = []
        """In order of their ends."""

    async def run(self) -> None:
        """Nobody begins after `load.seconds`; returns when what was begun has ended."""
        self._start_ns = time.monotonic_ns()
        async with asyncio.TaskGroup() as group:
            for chat in range(self._load.num_chats):
                group.create_task(self._chat(chat))
            for number in itertools.count():
                due_s = self._load.long_first_s + number * self._load.long_every_s
                if due_s >= self._load.seconds:
                    break
                await asyncio.sleep(max(0.0, due_s - self._now_s()))
                group.create_task(self._exchange(Kind.LONG, LONG_INDEX + number, self._long_request()))

    async def _chat(self, chat: int) -> None:
        request = WorkloadRequest(
            arrival_s=0.0,
            num_prompt_tokens=self._load.chat_prompt_tokens,
            num_output_tokens=self._load.chat_output_tokens,
        )
        for turn in itertools.count():
            if self._now_s() >= self._load.seconds:
                break
            has_failed = await self._exchange(Kind.CHAT, chat * CHAT_STRIDE + turn, request)
            if has_failed:
                await asyncio.sleep(1.0)  # a server that refuses at once is not asked thousands of times

    def _long_request(self) -> WorkloadRequest:
        return WorkloadRequest(
            arrival_s=0.0,
            num_prompt_tokens=self._lengths.randint(*self._load.long_prompt_tokens),
            num_output_tokens=self._load.long_output_tokens,
        )

    async def _exchange(self, kind: Kind, index: int, request: WorkloadRequest) -> bool:
        """Whether it failed."""
        body = body_of(self._prompts.prompt(index, request), num_output_tokens=request.num_output_tokens)
        answer, error, sent_s = Answer(), None, self._now_s()
        try:
            async with asyncio.timeout(ANSWER_DEADLINE_S):
                await self._route.stream(body, answer)
        except TimeoutError:
            error = f"no whole answer in {ANSWER_DEADLINE_S:g} s"
        except PdserveError as failure:
            error = failure.message
        if error is None and len(answer.token_ns) != request.num_output_tokens:
            error = f"{len(answer.token_ns)} tokens came instead of {request.num_output_tokens}"
        self.exchanges.append(
            Exchange(
                kind=kind,
                sent_s=sent_s,
                num_prompt_tokens=request.num_prompt_tokens,
                token_s=tuple(ns_to_seconds(instant_ns - self._start_ns) for instant_ns in answer.token_ns),
                error=error,
            )
        )
        return error is not None

    def _now_s(self) -> float:
        return (time.monotonic_ns() - self._start_ns) / NS_PER_S


async def warm_up(route: Route, load: Load, *, seed: int, num_rounds: int) -> None:
    """A long prompt, then chats at once, so often that every server gets some. Raises: `PdserveError`."""
    prompts = Prompts(ORDINARY_TOKEN_IDS, seed=seed)
    lengths = [load.long_prompt_tokens[1], *[load.chat_prompt_tokens] * load.num_chats]
    for turn in range(num_rounds):
        bodies = [
            body_of(
                prompts.prompt(
                    turn * CHAT_STRIDE + index,
                    WorkloadRequest(arrival_s=0.0, num_prompt_tokens=length, num_output_tokens=8),
                ),
                num_output_tokens=8,
            )
            for index, length in enumerate(lengths)
        ]
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            await asyncio.gather(*(route.stream(body, Answer()) for body in bodies))


def body_of(prompt: Sequence[int], *, num_output_tokens: int) -> dict[str, object]:
    return {
        "model": "default",
        "prompt": list(prompt),
        "max_tokens": num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }

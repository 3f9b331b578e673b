"""Sends each request when it is due, whatever became of those before: an open loop.

A closed loop, which waits for answers, sends less to a slow server and so hides how slow it is.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from pdserve.bench.api_client import COMPLETIONS_PATH, Answer, ApiClient
from pdserve.bench.load.prompts import Prompts
from pdserve.bench.load.result import SentRequest
from pdserve.bench.load.target import Target
from pdserve.bench.waiting import is_set_within
from pdserve.errors import PdserveError
from pdserve.units import div_ceil, ns_to_seconds
from pdserve.workload.request import WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLimits:
    max_in_flight: int = 1024
    """A request that is due when so many are in flight is not sent and counts as failed: to wait would close the
    loop."""
    deadline_s: float = 600.0
    """Of one request, until its last token."""
    num_traced: int = 0
    """Requests, evenly spread, whose handoffs are traced: at most as many as a worker remembers."""


@dataclass(slots=True, kw_only=True)
class Sending:
    """One request on its way. Instants are of this process's monotonic clock."""

    due_ns: int
    request: WorkloadRequest
    answer: Answer = field(default_factory=Answer)
    ended_ns: int | None = None
    error: str | None = None

    def as_sent(self, start_ns: int) -> SentRequest:
        def since_start(instant_ns: int) -> float:
            return ns_to_seconds(instant_ns - start_ns)

        answer = self.answer
        counts_differ = answer.num_generated not in (None, len(answer.token_ns))
        return SentRequest(
            due_s=since_start(self.due_ns),
            sent_s=since_start(answer.sent_ns or self.due_ns),
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_output_tokens=self.request.num_output_tokens,
            token_s=tuple(map(since_start, answer.token_ns)),
            num_generated=answer.num_generated if counts_differ else None,
            ended_s=None if self.ended_ns is None else since_start(self.ended_ns),
            finish_reason=answer.finish_reason,
            status=answer.status,
            error=self.error,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How far a load has come."""

    num_sent: int
    num_in_flight: int
    num_failed: int


class Sender:
    """Lifetime: one load. Threads: the event loop's only."""

    def __init__(self, client: ApiClient, target: Target, prompts: Prompts, limits: SendLimits) -> None:
        self._client = client
        self._target = target
        self._prompts = prompts
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()
        self.start_ns = 0
        self.sendings: list[Sending] = []
        """In order of arrival, also while they run."""
        self.traced: list[Answer] = []

    @property
    def counts(self) -> Counts:
        return Counts(
            num_sent=len(self.sendings),
            num_in_flight=len(self._tasks),
            num_failed=sum(sending.error is not None for sending in self.sendings),
        )

    async def send(self, requests: Sequence[WorkloadRequest], stop: asyncio.Event) -> list[SentRequest]:
        """Send all, or those that are due before `stop` is set, which also cuts short those in flight."""
        self.start_ns = time.monotonic_ns()
        stride = div_ceil(len(requests), self._limits.num_traced) if self._limits.num_traced else 0
        for index, request in enumerate(requests):
            body = self._body(index, request)  # before it is due: a long prompt takes milliseconds
            due_ns = self.start_ns + round(1e9 * request.arrival_s)
            if await is_set_within(stop, max(0.0, ns_to_seconds(due_ns - time.monotonic_ns()))):
                break
            self._start(Sending(due_ns=due_ns, request=request), body, traced=stride > 0 and index % stride == 0)
        await self._finish(stop)
        return [sending.as_sent(self.start_ns) for sending in self.sendings]

    def _start(self, sending: Sending, body: bytes, *, traced: bool) -> None:
        self.sendings.append(sending)
        if len(self._tasks) >= self._limits.max_in_flight:
            sending.error = f"not sent: {len(self._tasks)} requests were in flight, the most that the generator keeps"
            sending.ended_ns = time.monotonic_ns()
            return
        if traced:
            self.traced.append(sending.answer)
        task = asyncio.create_task(self._follow(sending, body, traced=traced))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, sending: Sending, body: bytes, *, traced: bool) -> None:
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                await self._client.stream(COMPLETIONS_PATH, body, sending.answer, traced=traced)
        except TimeoutError:
            sending.error = f"no whole answer in {self._limits.deadline_s:g} s"
        except PdserveError as error:
            sending.error = error.message
        sending.ended_ns = time.monotonic_ns()

    async def _finish(self, stop: asyncio.Event) -> None:
        """Wait for what is in flight, each of which has its deadline; or cancel it."""
        stopped = asyncio.create_task(stop.wait())
        while self._tasks and not stop.is_set():
            await asyncio.wait({stopped, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _body(self, index: int, request: WorkloadRequest) -> bytes:
        fields = {
            "model": self._target.model,
            "prompt": self._prompts.prompt(index, request),
            "max_tokens": request.num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._target.is_pdserve:
            fields["return_token_ids"] = True
        return msgspec.json.encode(fields)

"""What disaggregation is for, measured on one machine: hidden transfer, calm decodes, short prompts first.

Each experiment compares two or more arms in one run, several times in turn, on deployments that the caller starts.
"""

import asyncio
import itertools
import statistics
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from pdserve.bench.api_client import Answer, ApiClient
from pdserve.bench.handoff_trace import HandoffFigures, collect, figures
from pdserve.percentile import percentile


class OverlapRow(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the repetitions on an idle pair, and the worst."""

    num_prompt_tokens: int
    prefill_s: float
    landed_before_end_share: float
    landed_before_end_share_min: float
    exposed_ms: float
    exposed_share: float
    exposed_share_max: float
    num_repetitions: int


class LatencyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One arm of an experiment."""

    arm: str
    noun: str
    p50_s: float
    p99_s: float
    max_s: float
    num_samples: int
    ratio_p50: float | None = None
    """To the arm that it is compared with."""
    ratio_p99: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one arm sends. Prompts are runs of a natural text, no two alike."""

    text_ids: tuple[int, ...]
    duration_s: float
    num_streams: int = 4
    stream_prompt_tokens: int = 64
    stream_output_tokens: int = 60
    long_prompt_tokens: int | None = None
    """None: no long prompts in this arm."""
    long_every_s: float = 1.0

    def prompt(self, index: int, num_tokens: int) -> list[int]:
        start = (index * 37) % len(self.text_ids)
        repeated = itertools.islice(itertools.cycle(self.text_ids), start, start + num_tokens)
        return list(repeated)


async def measure_overlap(
    client: ApiClient,
    session: aiohttp.ClientSession,
    *,
    text_ids: tuple[int, ...],
    lengths: Sequence[int],
    num_repetitions: int,
    secret: str | None,
) -> list[OverlapRow]:
    """One prompt at a time on an idle pair, its trace looked at."""
    load = Load(text_ids=text_ids, duration_s=0)
    rows: list[OverlapRow] = []
    for length in lengths:
        found: list[HandoffFigures] = []
        for repetition in range(num_repetitions):
            answer = await client.complete(load.prompt(repetition, length), max_tokens=2, traced=True)
            trace = await collect(client, session, answer, secret=secret)
            found.append(figures(trace))
        rows.append(_overlap_row(length, found))
    return rows


def _overlap_row(length: int, found: list[HandoffFigures]) -> OverlapRow:
    landed = [figure.landed_before_end_share for figure in found]
    exposed_share = [figure.exposed_share for figure in found]
    return OverlapRow(
        num_prompt_tokens=length,
        prefill_s=statistics.median(figure.prefill_s for figure in found),
        landed_before_end_share=statistics.median(landed),
        landed_before_end_share_min=min(landed),
        exposed_ms=1e3 * statistics.median(figure.exposed_s for figure in found),
        exposed_share=statistics.median(exposed_share),
        exposed_share_max=max(exposed_share),
        num_repetitions=len(found),
    )


async def measure_gaps(client: ApiClient, load: Load) -> list[float]:
    """Gaps between tokens of `num_streams` closed-loop streams, in seconds."""
    answers: list[Answer] = []

    async def stream(first_index: int) -> None:
        for index in itertools.count(first_index, load.num_streams):
            prompt = load.prompt(index, load.stream_prompt_tokens)
            answers.append(await client.complete(prompt, max_tokens=load.stream_output_tokens, ignore_eos=True))

    await _run_for(load, client, [stream(index) for index in range(load.num_streams)])
    return [gap for answer in answers for gap in answer.gaps_s]


async def measure_short_ttft(client: ApiClient, load: Load, *, every_s: float) -> list[float]:
    """Time to first token of short prompts that arrive every `every_s`, in seconds."""
    answers: list[Answer] = []

    async def send(index: int) -> None:
        prompt = load.prompt(index, load.stream_prompt_tokens)
        answers.append(await client.complete(prompt, max_tokens=4, ignore_eos=True))

    async def arrive() -> None:
        async with asyncio.TaskGroup() as group:
            for index in itertools.count():
                group.create_task(send(index))
                await asyncio.sleep(every_s)

    await _run_for(load, client, [arrive()])
    return [answer.ttft_s for answer in answers]


async def _run_for(load: Load, client: ApiClient, clients: Sequence[Coroutine[object, object, None]]) -> None:
    """Run the clients, and the long prompts of the arm, for its duration; what is unfinished then is cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in clients]
    if load.long_prompt_tokens is not None:
        tasks.append(asyncio.create_task(_send_long_prompts(load, client, load.long_prompt_tokens)))
    done, _ = await asyncio.wait(tasks, timeout=load.duration_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in done:
        task.result()


async def _send_long_prompts(load: Load, client: ApiClient, num_tokens: int) -> None:
    async with asyncio.TaskGroup() as group:
        for index in itertools.count():
            group.create_task(_send_long_prompt(load, client, index, num_tokens))
            await asyncio.sleep(load.long_every_s)


async def _send_long_prompt(load: Load, client: ApiClient, index: int, num_tokens: int) -> None:
    await client.complete(load.prompt(1000 + index, num_tokens), max_tokens=1)


def latency_row(arm: str, noun: str, samples: Sequence[float], baseline: Sequence[float] | None = None) -> LatencyRow:
    """The percentiles of one arm, and their ratio to another's. Requires: samples."""
    row = LatencyRow(
        arm=arm,
        noun=noun,
        p50_s=percentile(samples, 50),
        p99_s=percentile(samples, 99),
        max_s=max(samples),
        num_samples=len(samples),
    )
    if baseline is None:
        return row
    return msgspec.structs.replace(
        row,
        ratio_p50=row.p50_s / percentile(baseline, 50),
        ratio_p99=row.p99_s / percentile(baseline, 99),
    )

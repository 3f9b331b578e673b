"""`pdserve bench-serving`: overlap, calm decodes and short prompts first, on this machine's cores."""

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from pdserve.bench.api_client import ApiClient
from pdserve.bench.handoff_check import NATURAL_TEXT
from pdserve.bench.provenance import this_commit, this_machine
from pdserve.bench.serving import (
    LatencyRow,
    Load,
    OverlapRow,
    latency_row,
    measure_gaps,
    measure_overlap,
    measure_short_ttft,
)
from pdserve.cli.out_file import write_json
from pdserve.cli.progress import say
from pdserve.cli.subparsers import Subparsers
from pdserve.config import environment
from pdserve.config.deployment import DeploymentRequest, place_workers
from pdserve.launch.deployment import DeploymentSettings, LocalDeployment
from pdserve.text.tokenizer import Tokenizer

OVERLAP_LENGTHS = (512, 1024, 2000)
LONG_TOKENS_EACH_SECOND = 256
"""What one core prefills in about 0.8 s: the longest prompt that one prefill worker can take each second."""
LONG_TOKENS = 2000
LONG_EVERY_S = 15.0
SHORT_EVERY_S = 2.0


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "bench-serving", help="measure overlap and interference on this machine", allow_abbrev=False
    )
    parser.add_argument("--model", help="model directory or hub id; default: the default model")
    parser.add_argument("--repetitions", type=int, default=3, help="of everything (default: 3)")
    parser.add_argument("--seconds", type=float, default=45.0, help="length of each arm (default: 45)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")


def run(arguments: argparse.Namespace) -> int:
    bench = _Bench(arguments)
    asyncio.run(bench.run())
    bench.report()
    return 0


class _Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        from pdserve.model.source import resolve_model

        self._arguments = arguments
        self._source = resolve_model(arguments.model)
        self._text_ids = tuple(Tokenizer.load(self._source.dir).encode(NATURAL_TEXT.read_text()))
        self._overlap: list[OverlapRow] = []
        self._latencies: list[LatencyRow] = []

    async def run(self) -> None:
        gaps: dict[str, list[float]] = {}
        ttfts: dict[str, list[float]] = {}
        for repetition in range(self._arguments.repetitions):
            say(f"repetition {repetition + 1} of {self._arguments.repetitions}")
            async with AsyncExitStack() as stack:
                client, session = await self._deploy(stack, num_prefill=1, num_decode=1, num_colocated=0)
                if repetition == 0:
                    await self._measure_overlap(client, session)
                await self._gaps(gaps, "apart, no prompts", client, long_tokens=None)
                await self._gaps(gaps, "apart, a prompt each second", client, long_tokens=LONG_TOKENS_EACH_SECOND)
                await self._ttfts(ttfts, "apart, short prompts alone", client, long_tokens=None)
                await self._ttfts(ttfts, "apart, a long prompt every 15 s", client, long_tokens=LONG_TOKENS)
            async with AsyncExitStack() as stack:
                client, _ = await self._deploy(stack, num_prefill=0, num_decode=0, num_colocated=1)
                await self._gaps(gaps, "colocated, no prompts", client, long_tokens=None)
                await self._gaps(gaps, "colocated, a prompt each second", client, long_tokens=LONG_TOKENS_EACH_SECOND)
        self._latencies = [*_rows(gaps, "ITL"), *_rows(ttfts, "TTFT of 64 tokens")]

    def report(self) -> None:
        for overlap in self._overlap:
            print(
                f"overlap prompt_tokens={overlap.num_prompt_tokens} prefill_s={overlap.prefill_s:.2f} "
                f"landed_before_end={100 * overlap.landed_before_end_share:.2f}% "
                f"(min {100 * overlap.landed_before_end_share_min:.2f}%) exposed_ms={overlap.exposed_ms:.2f} "
                f"exposed_share={100 * overlap.exposed_share:.3f}% (max {100 * overlap.exposed_share_max:.3f}%)"
            )
        for row in self._latencies:
            ratios = "" if row.ratio_p50 is None else f" ratio_p50={row.ratio_p50:.2f} ratio_p99={row.ratio_p99:.2f}"
            print(
                f"{row.noun}: {row.arm}: p50_ms={1e3 * row.p50_s:.1f} p99_ms={1e3 * row.p99_s:.1f} "
                f"max_ms={1e3 * row.max_s:.1f} samples={row.num_samples}{ratios}"
            )
        if self._arguments.json is not None:
            document = {
                "machine": this_machine(),
                "commit": this_commit(),
                "repetitions": self._arguments.repetitions,
                "seconds": self._arguments.seconds,
                "overlap": self._overlap,
                "latencies": self._latencies,
            }
            write_json(self._arguments.json, document)

    async def _measure_overlap(self, client: ApiClient, session: aiohttp.ClientSession) -> None:
        self._overlap = await measure_overlap(
            client,
            session,
            text_ids=self._text_ids,
            lengths=OVERLAP_LENGTHS,
            num_repetitions=self._arguments.repetitions,
            secret=environment.cluster_secret(),
        )

    async def _gaps(
        self, found: dict[str, list[float]], arm: str, client: ApiClient, *, long_tokens: int | None
    ) -> None:
        await self._arm(found, arm, lambda load: measure_gaps(client, load), long_tokens=long_tokens, every_s=1.0)

    async def _ttfts(
        self, found: dict[str, list[float]], arm: str, client: ApiClient, *, long_tokens: int | None
    ) -> None:
        await self._arm(
            found,
            arm,
            lambda load: measure_short_ttft(client, load, every_s=SHORT_EVERY_S),
            long_tokens=long_tokens,
            every_s=LONG_EVERY_S,
        )

    async def _arm(
        self,
        found: dict[str, list[float]],
        arm: str,
        measure: Callable[[Load], Awaitable[list[float]]],
        *,
        long_tokens: int | None,
        every_s: float,
    ) -> None:
        say(arm)
        load = Load(
            text_ids=self._text_ids,
            duration_s=self._arguments.seconds,
            long_prompt_tokens=long_tokens,
            long_every_s=every_s,
        )
        found.setdefault(arm, []).extend(await measure(load))

    async def _deploy(
        self, stack: AsyncExitStack, *, num_prefill: int, num_decode: int, num_colocated: int
    ) -> tuple[ApiClient, aiohttp.ClientSession]:
        """Each worker on one core, whatever there is; a colocated one on one core too."""
        cpus = tuple(sorted(os.sched_getaffinity(0)))[: max(1, num_prefill + num_decode + num_colocated)]
        places = place_workers(
            DeploymentRequest(
                num_prefill=num_prefill, num_decode=num_decode, num_colocated=num_colocated, available_cpus=cpus
            )
        )
        settings = DeploymentSettings(model_dir=str(self._source.dir), model_name=self._source.name, places=places)
        deployment = await stack.enter_async_context(LocalDeployment(settings, on_progress=say))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        return ApiClient(session, deployment.url, api_key=environment.api_key()), session


def _rows(found: dict[str, list[float]], noun: str) -> list[LatencyRow]:
    """Arms come in pairs: without prompts, then with them, compared with the arm before."""
    rows: list[LatencyRow] = []
    arms = list(found.items())
    for (quiet_arm, quiet), (loaded_arm, loaded) in zip(arms[::2], arms[1::2], strict=True):
        rows += [latency_row(quiet_arm, noun, quiet), latency_row(loaded_arm, noun, loaded, quiet)]
    return rows

#!/usr/bin/env python3
"""The experiment on two cores for vLLM: two servers, a core each, take turns at the arrival lists of pdserve's arms.

Rates and objectives come from the book of `benchmarks/two_cores.py`; `setup` comes before. Judged by the same rules.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from vllm_server import FOLDER, require_installed, vllm_server

from pdserve.bench.experiment.book import Book, load
from pdserve.bench.experiment.calibration import gemms_s
from pdserve.bench.experiment.conditions import Conditions, void_reason
from pdserve.bench.experiment.cpu_time import cpu_times, shares
from pdserve.bench.experiment.points import Point, points_named
from pdserve.bench.experiment.sending import send_load
from pdserve.bench.load.result import SentRequest, Summary
from pdserve.bench.load.summary import summarise
from pdserve.cli.out_file import require_folder_of, write_json
from pdserve.errors import ConfigError, PdserveError
from pdserve.workload.request import WorkloadRequest

RESULTS = FOLDER.parents[1] / "docs" / "results"
WARM_UP_SEED = 1_000_000
NUM_WARM_UPS = 4
WARM_UP_TOKENS = 8


class PeerRun(msgspec.Struct, frozen=True, kw_only=True):
    point: str
    seed: int
    void: str | None
    conditions: Conditions
    summary: Summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--book", type=Path, default=RESULTS / "two_cores.json", help="default: %(default)s")
    parser.add_argument("--points", default="headline", help="as of two_cores.py")
    parser.add_argument("--seeds", type=int, default=5, help="default: 5")
    parser.add_argument("--out", type=Path, default=RESULTS / "two_cores_vllm.json", help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        require_installed()
        require_folder_of("--out", arguments.out)
        points, book = points_named(arguments.points), load(arguments.book)
        asyncio.run(measure(book, points, num_seeds=arguments.seeds, out=arguments.out))
    except ConfigError as error:
        print(f"two_cores_vllm: {error.message}", file=sys.stderr)
        return 2
    except PdserveError as error:
        print(f"two_cores_vllm: {type(error).__name__}: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def measure(book: Book, points: Sequence[Point], *, num_seeds: int, out: Path) -> None:
    """Raises: `ConfigError` when a server does not start."""
    missing = [point.name for point in points if point.num_prompt_tokens not in book.reference.prefill_s]
    if missing:
        raise ConfigError(f"the book has no rate for {missing[0]}: run two_cores.py with --points {missing[0]} before")
    runs: list[PeerRun] = []
    first, second = (vllm_server(cpu, name=f"two-cores-{cpu}") for cpu in book.cpus)
    async with first as one, second as other:
        for each in (one, other):
            await each.wait_healthy()
        urls = (one.url, other.url)
        await send_in_turn(urls, warm_up(points[0]), WARM_UP_SEED)
        for seed, point in ((seed, point) for seed in range(num_seeds) for point in points):
            run = await measure_run(book, point, seed, urls=urls)
            runs.append(run)
            write_json(out, runs)
            print(line(run), flush=True)


async def measure_run(book: Book, point: Point, seed: int, *, urls: tuple[str, str]) -> PeerRun:
    requests = book.requests(point, seed=seed)
    gemms_before_s = await gemms_s(book.cpus)
    before = cpu_times()
    sent = await send_in_turn(urls, requests, seed)
    used = shares(before, cpu_times(), num_cpus=book.machine.num_cpus)
    conditions = Conditions.of(used, gemms_s=(gemms_before_s, await gemms_s(book.cpus)))
    return PeerRun(
        point=point.name,
        seed=seed,
        void=void_reason(conditions, reference_s=book.usual_gemm_s),
        conditions=conditions,
        summary=summarise(sent, book.objective(point)),
    )


async def send_in_turn(urls: Sequence[str], requests: Sequence[WorkloadRequest], seed: int) -> list[SentRequest]:
    """Every other request to each, so that neither has more; prompts of the two differ by the seed."""
    parts = [requests[index :: len(urls)] for index in range(len(urls))]
    loads = (
        send_load(url, part, 1000 * seed + index) for index, (url, part) in enumerate(zip(urls, parts, strict=True))
    )
    answered = await asyncio.gather(*loads)
    return sorted((one for part in answered for one in part), key=lambda one: one.due_s)


def warm_up(point: Point) -> list[WorkloadRequest]:
    """At once, so that both servers get some."""
    return [
        WorkloadRequest(arrival_s=0.0, num_prompt_tokens=point.num_prompt_tokens, num_output_tokens=WARM_UP_TOKENS)
        for _ in range(NUM_WARM_UPS)
    ]


def line(run: PeerRun) -> str:
    summary = run.summary
    told = {"TTFT p50": summary.ttft, "TPOT p50": summary.tpot, "ITL p50": summary.itl}
    values = " ".join(f"{name} {found.p50:.3f} s" for name, found in told.items() if found is not None)
    tail = "" if summary.itl is None else f" ITL p99 {summary.itl.p99:.3f} s"
    return f"{run.point} seed {run.seed}: {values}{tail} {summary.output_tokens_per_s:.1f} tokens/s" + (
        f" (void: {run.void})" if run.void else ""
    )


if __name__ == "__main__":
    sys.exit(main())

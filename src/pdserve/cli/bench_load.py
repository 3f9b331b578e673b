"""What `pdserve bench` does without an action: a load against a running server, and what its users would have felt."""

import argparse
import asyncio
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from pdserve.bench.handoff_check import NATURAL_TEXT
from pdserve.bench.load.capacity import Capacity, find_capacity
from pdserve.bench.load.run import Finished, LoadRunner
from pdserve.bench.load.table import capacity_lines, summary_lines
from pdserve.bench.load.target import Target, look_at
from pdserve.bench.report.page import write_report
from pdserve.cli.main import EXIT_FAILURE, EXIT_INTERRUPTED
from pdserve.cli.out_file import write_json
from pdserve.cli.progress import say
from pdserve.cli.until_signal import run_until_signal
from pdserve.cli.workload import Load, add_workload_flags, requested_load
from pdserve.config import environment
from pdserve.errors import ConfigError
from pdserve.workload.objective import Objective, parse_objective
from pdserve.workload.request import WorkloadRequest


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="of an OpenAI-compatible server, without /v1 (PDSERVE_API_KEY is its key)")
    add_workload_flags(parser)
    parser.add_argument("--slo", metavar="LIMITS", help="a good request's limits in seconds: ttft=2,tpot=0.05,stall=1")
    parser.add_argument("--model", help="that the server must serve; default: the first that it names")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where result.json and report.html go")
    parser.add_argument(
        "--capacity", action="store_true", help="find the largest rate at which 90%% of the requests meet --slo"
    )
    parser.add_argument(
        "--max-in-flight", type=int, default=1024, help="requests at most; those over it fail (default: %(default)s)"
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="of each request, after which it failed (default: %(default)g)",
    )


def run_load(arguments: argparse.Namespace) -> int:
    plan = _Plan.of(arguments)
    bench = _Bench(plan)
    run_until_signal(bench.run)
    return bench.exit_status


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The flags, checked before anything is sent."""

    url: str
    out: Path
    load: Load
    objective: Objective
    model: str | None
    finds_capacity: bool
    max_in_flight: int
    deadline_s: float

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "_Plan":
        """Raises: `ConfigError`."""
        if arguments.url is None:
            raise ConfigError("say where the load goes: --url http://HOST:PORT, or compare two results: bench compare")
        if not arguments.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {arguments.url} is no URL: it begins with http:// or https://")
        if arguments.out is None:
            raise ConfigError("say where result.json and report.html go: --out DIR")
        objective = Objective() if arguments.slo is None else parse_objective(arguments.slo)
        if arguments.capacity and objective == Objective():
            raise ConfigError("--capacity needs an objective: --slo ttft=2,tpot=0.05")
        if arguments.max_in_flight < 1:
            raise ConfigError(f"--max-in-flight must be 1 or more, not {arguments.max_in_flight}")
        if not 0 < arguments.deadline < math.inf:
            raise ConfigError(f"--deadline must be seconds, over 0, not {arguments.deadline}")
        load = requested_load(arguments)
        if arguments.capacity and not load.has_rate:
            raise ConfigError("--capacity needs requests that come at different instants: two at least")
        return cls(
            url=arguments.url.rstrip("/"),
            out=arguments.out,
            load=load,
            objective=objective,
            model=arguments.model,
            finds_capacity=arguments.capacity,
            max_in_flight=arguments.max_in_flight,
            deadline_s=arguments.deadline,
        )


class _Bench:
    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self.exit_status = 0

    async def run(self, stop: asyncio.Event) -> None:
        plan, api_key = self._plan, environment.api_key()
        _make_folder(plan.out)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)
        ) as session:
            target = await look_at(session, plan.url, model=plan.model, api_key=api_key, text=NATURAL_TEXT.read_text())
            configuration = {**self._configuration(target), **_too_long(plan.load.requests, target)}
            runner = LoadRunner(
                session,
                plan.url,
                target,
                max_in_flight=plan.max_in_flight,
                deadline_s=plan.deadline_s,
                api_key=api_key,
                secret=environment.cluster_secret(),
            )
            if plan.finds_capacity:
                await self._find_capacity(runner, configuration, stop)
            else:
                say(f"sending {len(plan.load.requests)} requests to {target.model} at {plan.url}")
                self._keep(await self._send(runner, plan.load.requests, configuration, stop, seed=plan.load.seed))
        if stop.is_set():
            self.exit_status = EXIT_INTERRUPTED

    async def _find_capacity(self, runner: LoadRunner, configuration: Mapping[str, str], stop: asyncio.Event) -> None:
        """Keeps the run of the largest rate that met the objective, or of the last one where none did."""
        load = self._plan.load
        kept: dict[float, Finished] = {}

        async def attainment_at(rate_per_s: float) -> float | None:
            requests = load.at_rate(rate_per_s).requests
            noted = {**configuration, "rate": f"{rate_per_s:.4g} requests/s"}
            # Other prompts each time, so that no server has them in a prefix cache.
            seed = load.seed + 1 + len(kept)
            kept[rate_per_s] = await self._send(runner, requests, noted, stop, seed=seed)
            attainment = kept[rate_per_s].result.summary.attainment
            if stop.is_set() or attainment is None:
                return None
            say(f"{rate_per_s:.3g} requests/s: {100 * attainment:.0f}% met the objective")
            return attainment

        capacity = await find_capacity(attainment_at, first_rate_per_s=load.rate_per_s)
        self._keep(kept.get(capacity.rate_per_s or 0.0) or list(kept.values())[-1])
        self._keep_capacity(capacity)

    async def _send(
        self,
        runner: LoadRunner,
        requests: Sequence[WorkloadRequest],
        configuration: Mapping[str, str],
        stop: asyncio.Event,
        *,
        seed: int,
    ) -> Finished:
        return await runner.run(requests, stop, objective=self._plan.objective, seed=seed, configuration=configuration)

    def _keep(self, finished: Finished) -> None:
        result, out = finished.result, self._plan.out
        (out / "result.json").write_bytes(msgspec.json.encode(result))
        write_report(result, out / "report.html", trace=finished.trace)
        print("\n".join(summary_lines(result)))
        print(f"wrote {out / 'result.json'} and {out / 'report.html'}")
        if result.summary.num_completed == 0:
            self.exit_status = EXIT_FAILURE

    def _keep_capacity(self, capacity: Capacity) -> None:
        path = self._plan.out / "capacity.json"
        write_json(path, capacity)
        print("\n".join(capacity_lines(capacity)))
        print(f"wrote {path}")

    def _configuration(self, target: Target) -> dict[str, str]:
        plan = self._plan
        return {
            "url": plan.url,
            "model": target.model,
            **plan.load.configuration,
            "prompt tokens": "of a natural text, shuffled" if target.tokenizes else "drawn from a range of ids",
            "max in flight": str(plan.max_in_flight),
            "deadline": f"{plan.deadline_s:g} s",
        }


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path} can't be made: {error.strerror}") from error


def _too_long(requests: Sequence[WorkloadRequest], target: Target) -> dict[str, str]:
    """A note where some requests do not fit in the model's context. Raises: `ConfigError` where none does."""
    limit = target.max_model_len
    if limit is None:
        return {}
    num_too_long = sum(request.num_prompt_tokens + request.num_output_tokens > limit for request in requests)
    if num_too_long == 0:
        return {}
    if num_too_long == len(requests):
        raise ConfigError(
            f"no request fits in the {limit} tokens that {target.model} takes; make them shorter: --scale-length"
        )
    note = f"{num_too_long} of {len(requests)} requests are longer than the {limit} tokens that the model takes"
    print(f"pdserve bench: {note}, and will fail; --scale-length makes them shorter", file=sys.stderr)
    return {"too long": note}

"""`pdserve bench-decoding`: what speculation yields and what grammars cost, on one core."""

import argparse
import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from pdserve.bench.api_client import ApiClient
from pdserve.bench.decoding import DecodingRow, Load, Run, measure, rows_of
from pdserve.bench.decoding_loads import grammar_loads, speculation_loads
from pdserve.bench.documents import DocumentCount, count_valid_documents
from pdserve.bench.handoff_check import Prober
from pdserve.bench.provenance import this_commit, this_machine
from pdserve.cli.out_file import write_json
from pdserve.cli.progress import say
from pdserve.cli.subparsers import Subparsers
from pdserve.config import environment
from pdserve.config.deployment import DeploymentRequest, place_workers
from pdserve.errors import InternalError
from pdserve.launch.deployment import DeploymentSettings, LocalDeployment

PLAIN = "plain"
NGRAM = "ngram"

WORKER_ARGUMENTS = {PLAIN: ("--threads", "1"), NGRAM: ("--threads", "1", "--speculate", "ngram")}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arm:
    client: ApiClient
    prober: Prober


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "bench-decoding", help="measure speculation and grammars on this machine", allow_abbrev=False
    )
    parser.add_argument("--model", help="model directory or hub id; default: the default model")
    parser.add_argument("--repetitions", type=int, default=5, help="of each arm, in turn (default: 5)")
    parser.add_argument("--documents", type=int, default=200, help="documents to generate by schemas (default: 200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")


def run(arguments: argparse.Namespace) -> int:
    rows, documents = asyncio.run(_measure(arguments))
    for row in rows:
        acceptance = "" if row.acceptance is None else f" accepted={100 * row.acceptance:.0f}%"
        ratio = "" if row.ratio is None else f" ratio={row.ratio:.2f}"
        print(
            f"{row.load}: {row.arm}: streams={row.num_streams} tokens_per_s={row.tokens_per_s:.1f} "
            f"({row.tokens_per_s_min:.1f} to {row.tokens_per_s_max:.1f}){ratio} "
            f"guesses_per_token={row.guesses_per_token:.2f}{acceptance}"
        )
    print(f"documents: {documents.num_valid} of {documents.num_documents} valid, over {documents.num_schemas} schemas")
    if arguments.json is not None:
        document = {
            "machine": this_machine(),
            "commit": this_commit(),
            "repetitions": arguments.repetitions,
            "rows": rows,
            "documents": documents,
        }
        write_json(arguments.json, document)
    return 0 if documents.num_valid == documents.num_documents else 1


async def _measure(arguments: argparse.Namespace) -> tuple[list[DecodingRow], DocumentCount]:
    """Both workers are there all the time, and take turns on one core."""
    from pdserve.model.source import resolve_model

    source = resolve_model(arguments.model)
    core = min(os.sched_getaffinity(0))
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        arms: dict[str, _Arm] = {}
        for name, worker_arguments in WORKER_ARGUMENTS.items():
            request = DeploymentRequest(num_prefill=0, num_decode=0, num_colocated=1, available_cpus=(core,))
            settings = DeploymentSettings(
                model_dir=str(source.dir),
                model_name=source.name,
                places=place_workers(request),
                worker_arguments=worker_arguments,
            )
            deployment = await stack.enter_async_context(LocalDeployment(settings, on_progress=say))
            client = ApiClient(session, deployment.url, api_key=environment.api_key())
            arms[name] = _Arm(client=client, prober=Prober(client, session, secret=environment.cluster_secret()))
        rows: list[DecodingRow] = []
        for load in speculation_loads():
            runs = await _take_turns({name: (arm, load) for name, arm in arms.items()}, arguments.repetitions)
            _require_equal_tokens(load, runs)
            rows += rows_of(load, runs)
        plain = arms[PLAIN]
        free, guided = grammar_loads()
        runs = await _take_turns({free.name: (plain, free), guided.name: (plain, guided)}, arguments.repetitions)
        rows += rows_of(guided, runs)
        return rows, await count_valid_documents(plain.client, num_documents=arguments.documents)


async def _take_turns(arms: Mapping[str, tuple[_Arm, Load]], num_repetitions: int) -> dict[str, Sequence[Run]]:
    """Once more than counted: the first round warms up."""
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    for _ in range(num_repetitions + 1):
        for name, (arm, load) in arms.items():
            runs[name].append(await measure(arm.client, arm.prober, load))
    return {name: found[1:] for name, found in runs.items()}


def _require_equal_tokens(load: Load, runs: Mapping[str, Sequence[Run]]) -> None:
    """Raises: `InternalError` when the arms did not say the same."""
    answers = {run.token_ids for found in runs.values() for run in found}
    if len(answers) != 1:
        raise InternalError(f"the arms of {load.name!r} have {len(answers)} different answers")

"""`pdserve verify-semantics`: requests to a colocated and a disaggregated server, whose answers must not differ."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

import aiohttp

from pdserve.bench.handoff_check import NATURAL_TEXT
from pdserve.bench.semantics.battery import battery
from pdserve.bench.semantics.case import Case, Outcome
from pdserve.bench.semantics.comparison import Difference, differences
from pdserve.bench.semantics.completions import Texts
from pdserve.bench.semantics.sender import Sender
from pdserve.cli.progress import say
from pdserve.cli.speculation import add_speculation_flags, requested_speculation, speculation_flags
from pdserve.cli.subparsers import Subparsers
from pdserve.cli.worker import add_engine_flags, engine_flags
from pdserve.config import environment
from pdserve.config.deployment import DeploymentRequest, place_workers
from pdserve.launch.deployment import DeploymentSettings, LocalDeployment
from pdserve.text.tokenizer import Tokenizer

NUM_AT_ONCE = 6
"""Requests at once to the disaggregated server, so that batches differ from those of the colocated one, which gets them
one by one."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "verify-semantics", help="compare the answers of disaggregated and colocated servers", allow_abbrev=False
    )
    parser.add_argument("--model", help="model directory or hub id; default: the default model")
    parser.add_argument("--only", metavar="TEXT", help="only the cases whose names have this text, and their streams")
    add_engine_flags(parser)
    add_speculation_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from pdserve.model.source import resolve_model

    source = resolve_model(arguments.model)
    cases = battery(Texts.of(NATURAL_TEXT.read_text(), Tokenizer.load(source.dir)))
    if arguments.only is not None:
        cases = [case for case in cases if arguments.only in case.name]
    speculation = requested_speculation(arguments, source.dir)
    colocated, apart = (
        DeploymentSettings(
            model_dir=str(source.dir),
            model_name=source.name,
            places=place_workers(request),
            worker_arguments=(*engine_flags(arguments), "--threads", "1", *flags),
        )
        for request, flags in (
            (_request(num_colocated=1, num_each=0), ()),
            # Guesses on one side only: they must change nothing.
            (_request(num_colocated=0, num_each=1), speculation_flags(speculation)),
        )
    )
    outcomes = {
        "colocated": asyncio.run(_outcomes(colocated, cases, num_at_once=1)),
        "disaggregated": asyncio.run(_outcomes(apart, cases, num_at_once=NUM_AT_ONCE)),
    }
    return _report(cases, differences(cases, outcomes))


def _request(*, num_colocated: int, num_each: int) -> DeploymentRequest:
    cpus = tuple(sorted(os.sched_getaffinity(0))[:2])
    return DeploymentRequest(
        num_prefill=num_each, num_decode=num_each, num_colocated=num_colocated, available_cpus=cpus
    )


async def _outcomes(settings: DeploymentSettings, cases: Sequence[Case], *, num_at_once: int) -> list[Outcome]:
    async with LocalDeployment(settings, on_progress=say) as deployment, aiohttp.ClientSession() as session:
        say(f"sending {len(cases)} requests, {num_at_once} at once")
        sender = Sender(session, deployment.url, api_key=environment.api_key())
        return await sender.send_all(cases, num_at_once=num_at_once)


def _report(cases: Sequence[Case], found: Sequence[Difference]) -> int:
    for difference in found:
        print(f"{difference.case_name}: {difference.what}")
    num_differing = len({difference.case_name for difference in found})
    verdict = "FAILED" if found or not cases else "ok"
    print(f"verify-semantics: {verdict} cases={len(cases)} differing={num_differing}")
    sys.stdout.flush()
    return 0 if verdict == "ok" else 1

"""`pdserve serve`: a whole deployment on this machine, until Ctrl-C."""

import argparse
import asyncio
import json
import os

from pdserve.cli.drain import add_drain_flag
from pdserve.cli.gateway import add_parser_choices, parser_choice_flags
from pdserve.cli.parallel import add_parallel_flags, require_parallel_model
from pdserve.cli.progress import say
from pdserve.cli.speculation import add_speculation_flags, requested_speculation, speculation_flags
from pdserve.cli.subparsers import Subparsers
from pdserve.cli.tls import add_tls_flags, requested_tls, tls_flags
from pdserve.cli.until_signal import run_until_signal
from pdserve.cli.worker import add_engine_flags, engine_flags, parse_port
from pdserve.config.deployment import DeploymentRequest, place_workers
from pdserve.launch.deployment import DeploymentSettings, LocalDeployment, require_free_port

EXAMPLE_PROMPT = "Explain in two sentences why the sky is blue."
"""One that the small default model answers well, greedily."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("serve", help="start gateway and workers on this machine", allow_abbrev=False)
    parser.add_argument("model", nargs="?", help="model directory, hub id, or nothing for the default model")
    parser.add_argument("--prefill", type=int, metavar="N", help="prefill workers (default: 1)")
    parser.add_argument("--decode", type=int, metavar="M", help="decode workers (default: 1)")
    parser.add_argument("--colocated", type=int, metavar="K", help="workers that do both (default: 0)")
    parser.add_argument("--host", default="127.0.0.1", help="address of the gateway (default: 127.0.0.1)")
    parser.add_argument("--port", type=parse_port, default=8000, help="port of the gateway (default: 8000)")
    add_parser_choices(parser)
    add_parallel_flags(parser)
    add_engine_flags(parser)
    add_speculation_flags(parser)
    add_drain_flag(parser)
    add_tls_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    from pdserve.model.source import resolve_model

    places = place_workers(deployment_request(arguments))
    worker_arguments = engine_flags(arguments)
    tls = requested_tls(arguments)
    require_free_port(arguments.host, arguments.port)
    source = resolve_model(arguments.model)
    require_parallel_model(source.dir, places)
    speculation = requested_speculation(arguments, source.dir)
    say(f"model {source.name} in {source.dir}")
    settings = DeploymentSettings(
        model_dir=str(source.dir),
        model_name=source.name,
        places=places,
        host=arguments.host,
        port=arguments.port,
        worker_arguments=(*worker_arguments, *speculation_flags(speculation)),
        gateway_arguments=parser_choice_flags(arguments),
        tls_arguments=tls_flags(tls),
        drain_timeout_s=arguments.drain_timeout,
    )
    run_until_signal(lambda stop: _serve(settings, stop))
    return 0


def deployment_request(arguments: argparse.Namespace) -> DeploymentRequest:
    """One prefill and one decode worker unless something else is asked for; `--colocated K` alone means just those."""
    nothing_asked = arguments.prefill is None and arguments.decode is None
    default_split = 0 if arguments.colocated and nothing_asked else 1
    return DeploymentRequest(
        num_prefill=default_split if arguments.prefill is None else arguments.prefill,
        num_decode=default_split if arguments.decode is None else arguments.decode,
        num_colocated=arguments.colocated or 0,
        available_cpus=tuple(sorted(os.sched_getaffinity(0))),
        prefill_tp=arguments.prefill_tp,
        decode_tp=arguments.decode_tp,
        decode_dp=arguments.decode_dp,
    )


async def _serve(settings: DeploymentSettings, stop: asyncio.Event) -> None:
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(_run(settings))
    try:
        await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            say("stopping")
    finally:
        stopping.cancel()
        if not starting.done():
            starting.cancel()
        await asyncio.wait({starting})
    if not starting.cancelled():
        starting.result()


async def _run(settings: DeploymentSettings) -> None:
    async with LocalDeployment(settings, on_progress=say) as deployment:
        print(f"ready: {deployment.url}   try:  {example_curl(deployment.url)}", flush=True)
        await deployment.watch()


def example_curl(url: str) -> str:
    messages = [{"role": "user", "content": EXAMPLE_PROMPT}]
    body = {"model": "default", "stream": True, "temperature": 0, "messages": messages}
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'"

"""`pdserve trace`: one request's way, as a Chrome/Perfetto trace and as a picture."""

import argparse
import asyncio
import json
import os
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from pdserve.bench.api_client import ApiClient
from pdserve.bench.handoff_trace import HandoffTrace, chrome_trace, collect, figures
from pdserve.cli.progress import say
from pdserve.cli.subparsers import Subparsers
from pdserve.cli.worker import add_engine_flags, engine_flags
from pdserve.config import environment
from pdserve.config.deployment import DeploymentRequest, place_workers
from pdserve.errors import ConfigError
from pdserve.launch.deployment import DeploymentSettings, LocalDeployment


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("trace", help="trace one request's handoff", allow_abbrev=False)
    parser.add_argument("prompt", metavar="PROMPT", help="text to complete")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="a Chrome trace, for ui.perfetto.dev")
    parser.add_argument("--png", type=Path, metavar="FILE.png", help="the same as a picture")
    parser.add_argument(
        "--url", help="a running gateway on this machine; default: start one prefill and one decode worker"
    )
    parser.add_argument("--model", help="model directory or hub id; default: the default model")
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens to generate (default: 8)")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.out is None and arguments.png is None:
        raise ConfigError("say where the trace goes: --out FILE.json, --png FILE.png or both")
    for path in (arguments.out, arguments.png):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"there is no directory {path.parent}")
    trace = asyncio.run(_trace(arguments))
    summary = figures(trace)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(chrome_trace(trace)))
        print(f"wrote {arguments.out}: open it in https://ui.perfetto.dev")
    if arguments.png is not None:
        from pdserve.bench.handoff_picture import draw

        draw(trace, arguments.png)
        print(f"wrote {arguments.png}")
    print(
        f"trace: tokens={summary.num_tokens} prefill_ms={1e3 * summary.prefill_s:.1f} "
        f"layer_pushes={summary.num_layer_pushes} posted_before_pass_end={summary.num_pushed_before_end} "
        f"landed_before_pass_end={100 * summary.landed_before_end_share:.1f}% "
        f"exposed_ms={1e3 * summary.exposed_s:.2f} ({100 * summary.exposed_share:.2f}% of the prefill)"
    )
    return 0


async def _trace(arguments: argparse.Namespace) -> HandoffTrace:
    async with AsyncExitStack() as stack:
        url = arguments.url
        if url is None:
            deployment = LocalDeployment(_settings(arguments), on_progress=say)
            url = (await stack.enter_async_context(deployment)).url
        session = await stack.enter_async_context(aiohttp.ClientSession())
        client = ApiClient(session, url.rstrip("/"), api_key=environment.api_key())
        answer = await client.complete(arguments.prompt, max_tokens=arguments.max_tokens, traced=True)
        return await collect(client, session, answer, secret=environment.cluster_secret())


def _settings(arguments: argparse.Namespace) -> DeploymentSettings:
    from pdserve.model.source import resolve_model

    source = resolve_model(arguments.model)
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    places = place_workers(DeploymentRequest(num_prefill=1, num_decode=1, num_colocated=0, available_cpus=cpus))
    return DeploymentSettings(
        model_dir=str(source.dir),
        model_name=source.name,
        places=places,
        worker_arguments=engine_flags(arguments),
    )

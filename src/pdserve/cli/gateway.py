"""`pdserve gateway`: the OpenAI API in front of workers that join it."""

import argparse
import asyncio
import os
from pathlib import Path

from pdserve.cli.drain import add_drain_flag
from pdserve.cli.logs import LEVELS, configure_logs, warn_if_open
from pdserve.cli.model import chosen_model
from pdserve.cli.subparsers import Subparsers
from pdserve.cli.tls import add_api_tls_flags, add_tls_flags, control_port, requested_api_tls, requested_tls
from pdserve.cli.until_signal import run_until_signal
from pdserve.cli.worker import parse_cpus, parse_port, require_cpus
from pdserve.config import environment
from pdserve.gateway.formats.parser_choice import ReasoningParserChoice, ToolParserChoice
from pdserve.launch.child import report_ready


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("gateway", help="run the gateway that workers join", allow_abbrev=False)
    parser.add_argument("model", nargs="?", help="model directory, hub id, or nothing for the default model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=parse_port, default=8000, help="port to listen on (default: 8000)")
    parser.add_argument("--cpus", type=parse_cpus, default=(), metavar="LIST", help="cores to run on, such as 0,2-5")
    add_parser_choices(parser)
    add_drain_flag(parser)
    add_tls_flags(parser)
    parser.add_argument(
        "--control-port", type=parse_port, metavar="PORT", help="where workers join in TLS (default: --port plus one)"
    )
    add_api_tls_flags(parser)
    parser.add_argument("--log-level", choices=LEVELS, default="warning", help="default: warning")
    parser.add_argument("--model-dir", help=argparse.SUPPRESS)
    parser.add_argument("--model-name", help=argparse.SUPPRESS)
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)


def add_parser_choices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tool-parser",
        choices=[choice.value for choice in ToolParserChoice],
        default=ToolParserChoice.AUTO.value,
        help="how the model writes calls of tools (default: auto, as its chat template does)",
    )
    parser.add_argument(
        "--reasoning-parser",
        choices=[choice.value for choice in ReasoningParserChoice],
        default=ReasoningParserChoice.AUTO.value,
        help="how the model writes its reasoning (default: auto, as its chat template does)",
    )


def parser_choice_flags(arguments: argparse.Namespace) -> tuple[str, ...]:
    """What `add_parser_choices` parsed, for another process."""
    return ("--tool-parser", arguments.tool_parser, "--reasoning-parser", arguments.reasoning_parser)


def run(arguments: argparse.Namespace) -> int:
    from pdserve.gateway.process import run_gateway
    from pdserve.gateway.settings import GatewaySettings

    require_cpus(arguments.cpus)
    configure_logs(name="gateway", level=arguments.log_level)
    warn_if_open(arguments.host, environment.cluster_secret())
    if arguments.cpus:
        os.sched_setaffinity(0, arguments.cpus)
    tls = requested_tls(arguments)
    model_dir, model_name = chosen_model(arguments)
    settings = GatewaySettings(
        model_name=model_name,
        model_dir=Path(model_dir),
        host=arguments.host,
        port=arguments.port,
        api_key=environment.api_key(),
        cluster_secret=environment.cluster_secret(),
        tls=tls,
        control_port=control_port(arguments, tls, default=arguments.port + 1),
        api_tls=requested_api_tls(arguments),
        tool_parser=ToolParserChoice(arguments.tool_parser),
        reasoning_parser=ReasoningParserChoice(arguments.reasoning_parser),
        drain_timeout_s=arguments.drain_timeout,
    )

    async def service(stop: asyncio.Event) -> None:
        await run_gateway(settings, stop, lambda: report_ready(arguments.ready_fd))

    run_until_signal(service)
    return 0

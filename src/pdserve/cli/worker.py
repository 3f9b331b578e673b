"""`pdserve worker`: one worker, joined to a gateway."""

import argparse
import asyncio
import os
from pathlib import Path

from pdserve.cli.drain import add_drain_flag
from pdserve.cli.logs import LEVELS, configure_logs, warn_if_open
from pdserve.cli.model import chosen_model
from pdserve.cli.speculation import add_speculation_flags, requested_speculation
from pdserve.cli.subparsers import Subparsers
from pdserve.cli.tls import add_tls_flags, control_port, requested_tls
from pdserve.cli.until_signal import run_until_signal
from pdserve.config import environment
from pdserve.config.device import Device
from pdserve.config.role import Role
from pdserve.config.worker import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_KV_TOKENS,
    DEFAULT_LEASE_S,
    DEFAULT_MAX_RUNNING,
    DEFAULT_PAGE_SLOTS,
    DEFAULT_SATURATION_TOKENS,
    HEARTBEATS_A_LEASE,
    PROVIDERS,
    WorkerSettings,
)
from pdserve.errors import ConfigError, FabricError
from pdserve.fabric.native import NativeFabric
from pdserve.fabric.port import DomainGroup
from pdserve.launch.child import report_ready


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("worker", help="run one worker and join a gateway", allow_abbrev=False)
    parser.add_argument("model", nargs="?", help="model directory, hub id, or nothing for the default model")
    parser.add_argument("--role", required=True, choices=[role.value for role in Role], help="what the worker does")
    parser.add_argument("--join", required=True, metavar="URL", help="the gateway, such as http://10.0.0.1:8000")
    parser.add_argument("--name", help="default: the role, the host name and the process id")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on, and that other workers dial (default: %(default)s)"
    )
    parser.add_argument("--port", type=parse_port, default=0, help="port to listen on (default: any free one)")
    parser.add_argument(
        "--fabric-hosts",
        type=parse_hosts,
        metavar="LIST",
        help="addresses of the interfaces for RDMA writes, such as 10.0.1.7,10.0.2.7, or auto for those that "
        "`pdserve topology` chooses; default: --host, with --provider efa auto",
    )
    _add_rank_flags(parser)
    _add_time_flags(parser)
    add_engine_flags(parser)
    add_speculation_flags(parser)
    add_drain_flag(parser)
    add_tls_flags(parser)
    parser.add_argument(
        "--control-port",
        type=parse_port,
        metavar="PORT",
        help="where decode workers dial in TLS (default: any free one)",
    )
    parser.add_argument("--log-level", choices=LEVELS, default="warning", help="default: warning")
    parser.add_argument(
        "--allow-stop-at",
        action="store_true",
        help="for tests of faults alone: PUT /debug/stop-at/STATE makes the process stop itself at that handoff state",
    )
    parser.add_argument("--model-dir", help=argparse.SUPPRESS)
    parser.add_argument("--model-name", help=argparse.SUPPRESS)
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)


def _add_time_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--join-timeout", type=float, default=30.0, metavar="SECONDS", help="for joining (default: 30)")
    parser.add_argument(
        "--lease",
        type=float,
        default=DEFAULT_LEASE_S,
        metavar="SECONDS",
        help=f"silence of a worker or its gateway that counts as death (default: {DEFAULT_LEASE_S:g})",
    )


def _add_rank_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=[device.value for device in Device],
        default=Device.CPU.value,
        help="what the ranks compute on; cuda takes a GPU a rank, and is untested on hardware (default: %(default)s)",
    )
    parser.add_argument("--cpus", type=parse_cpus, default=(), metavar="LIST", help="cores to pin to, such as 0,2-5")
    parser.add_argument("--threads", type=int, help="of each rank; default: its share of --cpus, else 1")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="ranks that share a model (default: 1)"
    )
    parser.add_argument(
        "--data-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="of a worker that decodes: whole models, each with its KV cache (default: 1)",
    )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that `pdserve serve` hands to each of its workers."""
    parser.add_argument("--provider", choices=PROVIDERS, default="tcp", help="libfabric provider (default: tcp)")
    parser.add_argument(
        "--kv-tokens", type=int, default=DEFAULT_KV_TOKENS, help="tokens that the KV cache holds (default: %(default)s)"
    )
    parser.add_argument(
        "--page-slots", type=int, default=DEFAULT_PAGE_SLOTS, help="tokens in a page (default: %(default)s)"
    )
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        default=DEFAULT_CHUNK_TOKENS,
        help="most prompt tokens in a pass (default: %(default)s)",
    )
    parser.add_argument(
        "--max-running", type=int, default=DEFAULT_MAX_RUNNING, help="most sequences in a pass (default: %(default)s)"
    )
    parser.add_argument("--capture-kv", action="store_true", help=argparse.SUPPRESS)


def require_engine(arguments: argparse.Namespace, *, fabric_hosts: tuple[str, ...], device: Device) -> None:
    """Raises: `ConfigError` when a flag of `add_engine_flags` makes no sense, or the provider is not to be had here or
    can't reach the device's memory."""
    for flag in ("kv_tokens", "page_slots", "chunk_tokens", "max_running"):
        if getattr(arguments, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} must be 1 or more, not {getattr(arguments, flag)}")
    if arguments.max_running >= arguments.chunk_tokens:
        raise ConfigError(
            f"--max-running {arguments.max_running} must be below --chunk-tokens {arguments.chunk_tokens}, "
            "or no prompt gets into a full pass"
        )
    try:
        # The NICs of `auto` are chosen when the worker starts; here any will do.
        groups = [DomainGroup(bind_hosts=fabric_hosts or ("",))]
        NativeFabric(arguments.provider, groups, device_memory=device is Device.CUDA).close()
    except FabricError as error:
        raise ConfigError(f"--provider {arguments.provider} can't be used: {error.message}") from error


def engine_flags(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The flags of `add_engine_flags`, spelled out for a child on this machine.

    Raises: `ConfigError`, as `require_engine`.
    """
    fabric_hosts = chosen_fabric_hosts(None, provider=arguments.provider, host="127.0.0.1")
    require_engine(arguments, fabric_hosts=fabric_hosts, device=Device.CPU)
    flags = ("provider", "kv_tokens", "page_slots", "chunk_tokens", "max_running")
    spelled = [part for flag in flags for part in (f"--{flag.replace('_', '-')}", str(getattr(arguments, flag)))]
    return (*spelled, *(("--capture-kv",) if arguments.capture_kv else ()))


def chosen_fabric_hosts(named: tuple[str, ...] | None, *, provider: str, host: str) -> tuple[str, ...]:
    """What the fabric binds to; empty: what the topology chooses. An EFA device has no address that `host` could be."""
    if named is not None:
        return named
    return () if provider == "efa" else (host,)


def run(arguments: argparse.Namespace) -> int:
    from pdserve.worker.process import run_worker

    settings = worker_settings(arguments)
    configure_logs(name=settings.name, level=arguments.log_level)
    warn_if_open(settings.host, settings.secret)
    if settings.cpus:
        os.sched_setaffinity(0, settings.cpus)

    async def service(stop: asyncio.Event) -> None:
        await run_worker(settings, stop=stop, on_ready=lambda: report_ready(arguments.ready_fd))

    run_until_signal(service)
    return 0


def worker_settings(arguments: argparse.Namespace) -> WorkerSettings:
    """Raises: `ConfigError` when a flag makes no sense or the model can't be had."""
    device = _requested_device(arguments)
    fabric_hosts = _requested_fabric_hosts(arguments)
    require_engine(arguments, fabric_hosts=fabric_hosts, device=device)
    require_parallel(arguments)
    tls = requested_tls(arguments)
    _require_url(arguments.join, in_tls=tls is not None)
    require_cpus(arguments.cpus)
    model_dir, model_name = chosen_model(arguments)
    return WorkerSettings(
        name=arguments.name or f"{arguments.role}-{os.uname().nodename}-{os.getpid()}",
        role=Role(arguments.role),
        join_url=arguments.join.rstrip("/"),
        model_dir=model_dir,
        model_name=model_name,
        host=arguments.host,
        port=arguments.port,
        provider=arguments.provider,
        fabric_hosts=fabric_hosts,
        device=device,
        cpus=arguments.cpus,
        num_threads=arguments.threads or max(1, len(arguments.cpus) // _num_ranks(arguments)),
        tensor_parallel_size=arguments.tensor_parallel_size,
        data_parallel_size=arguments.data_parallel_size,
        page_slots=arguments.page_slots,
        kv_tokens=arguments.kv_tokens,
        chunk_tokens=arguments.chunk_tokens,
        saturation_tokens=min(DEFAULT_SATURATION_TOKENS, arguments.chunk_tokens),
        max_running=arguments.max_running,
        speculation=requested_speculation(arguments, Path(model_dir)),
        lease_s=arguments.lease,
        heartbeat_s=arguments.lease / HEARTBEATS_A_LEASE,
        join_timeout_s=arguments.join_timeout,
        drain_timeout_s=arguments.drain_timeout,
        secret=environment.cluster_secret(),
        tls=tls,
        control_port=control_port(arguments, tls, default=0),
        capture_kv=arguments.capture_kv,
        allow_stop_at=arguments.allow_stop_at,
    )


def _requested_device(arguments: argparse.Namespace) -> Device:
    """Raises: `ConfigError` when the KV can't be captured there."""
    device = Device(arguments.device)
    if arguments.capture_kv and device is not Device.CPU:
        raise ConfigError("--capture-kv copies KV out of host memory: leave it out, or --device")
    return device


def _requested_fabric_hosts(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Raises: `ConfigError` when the provider has none to choose from."""
    fabric_hosts = chosen_fabric_hosts(arguments.fabric_hosts, provider=arguments.provider, host=arguments.host)
    if not fabric_hosts and arguments.provider == "shm":
        raise ConfigError("--fabric-hosts auto chooses NICs, and --provider shm uses none: leave it out")
    return fabric_hosts


def _require_url(join: str, *, in_tls: bool) -> None:
    """Raises: `ConfigError`."""
    if in_tls and not join.startswith("https://"):
        raise ConfigError(
            f"--join {join} is not in TLS: with --tls-cert, give https:// and the gateway's --control-port"
        )
    if not join.startswith(("http://", "https://")):
        raise ConfigError(f"--join {join} is no URL such as http://10.0.0.1:8000")


def require_parallel(arguments: argparse.Namespace) -> None:
    """Raises: `ConfigError` when the numbers of ranks or threads make no sense for the role."""
    for flag in ("threads", "tensor_parallel_size", "data_parallel_size"):
        number = getattr(arguments, flag)
        if number is not None and number < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} must be 1 or more, not {number}")
    if arguments.data_parallel_size > 1 and arguments.role == Role.PREFILL.value:
        raise ConfigError("--data-parallel-size is for workers that decode: start several prefill workers instead")


def _num_ranks(arguments: argparse.Namespace) -> int:
    return arguments.tensor_parallel_size * arguments.data_parallel_size


def require_cpus(cpus: tuple[int, ...]) -> None:
    """Raises: `ConfigError` when this process may not run on all of them."""
    unknown_cpus = set(cpus) - os.sched_getaffinity(0)
    if unknown_cpus:
        raise ConfigError(f"--cpus names cores that this process may not use: {sorted(unknown_cpus)}")


def parse_cpus(text: str) -> tuple[int, ...]:
    """`0,2-5` as core numbers. Raises: `argparse.ArgumentTypeError`."""
    cpus: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            cpus.extend(range(int(first), int(last if dash else first) + 1))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of cores such as 0,2-5") from error
    return tuple(dict.fromkeys(cpus))


def parse_hosts(text: str) -> tuple[str, ...]:
    """`10.0.1.7,10.0.2.7` as addresses, `auto` as none. Raises: `argparse.ArgumentTypeError`."""
    if text == "auto":
        return ()
    hosts = tuple(host.strip() for host in text.split(","))
    if not all(hosts) or len(set(hosts)) != len(hosts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of different addresses such as 10.0.1.7,10.0.2.7")
    return hosts


def parse_port(text: str) -> int:
    """Raises: `argparse.ArgumentTypeError`."""
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port number")
    return int(text)

"""Measurements made by programs of their own: the limits in C, and the peers in a venv of theirs.

Each takes `PAGE_BYTES REGION_BYTES ROUNDS` and ends with one JSON line.
"""

import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from pdserve.bench.transfer import Contender, Limit, Measure, PageRun, Skipped
from pdserve.config.environment import child_environment
from pdserve.errors import ConfigError, InternalError

PROGRAM_DEADLINE_S = 120.0
PROGRAM_FOLDER = Path(__file__).parent
PEER_FOLDER = Path(__file__).parents[3] / "benchmarks" / "peers_transfer"


class ProgramResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a program prints."""

    name: str
    page_bytes: int
    num_bytes: int
    elapsed_ns: int


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    provider: str
    limit: Limit
    script: str
    package: str
    variables: dict[str, str] = {}


PEERS = (
    Peer(
        provider="nixl_ucx_tcp",
        limit=Limit.RAW_TCP,
        script="nixl_writes.py",
        package="nixl_cu12",
        variables={"UCX_TLS": "tcp"},
    ),
    Peer(provider="mooncake_tcp", limit=Limit.RAW_TCP, script="mooncake_writes.py", package="mooncake"),
    Peer(provider="nixl_ucx", limit=Limit.PROCESS_VM_WRITEV, script="nixl_writes.py", package="nixl_cu12"),
)


def limit_measures() -> dict[Limit, Measure]:
    """Raises: `ConfigError` when the programs were not built."""
    for limit in Limit:
        if not (PROGRAM_FOLDER / limit.value).is_file():
            raise ConfigError(f"{PROGRAM_FOLDER / limit.value} is missing; build it with scripts/setup")
    return {limit: partial(measure_program, [str(PROGRAM_FOLDER / limit.value)], {}) for limit in Limit}


def installed_peers() -> tuple[list[Contender], list[Skipped]]:
    contenders: list[Contender] = []
    skipped: list[Skipped] = []
    for peer in PEERS:
        if any((PEER_FOLDER / ".venv").glob(f"lib/python*/site-packages/{peer.package}")):
            command = [str(PEER_FOLDER / ".venv" / "bin" / "python"), str(PEER_FOLDER / peer.script)]
            measure = partial(measure_program, command, peer.variables)
            contenders.append(Contender(provider=peer.provider, limit=peer.limit, measure=measure, is_peer=True))
        else:
            skipped.append(Skipped(provider=peer.provider, reason="not installed; run benchmarks/peers_transfer/setup"))
    return contenders, skipped


def measure_program(command: Sequence[str], variables: dict[str, str], run: PageRun) -> float:
    """GB/s of one run of a program. Raises: `InternalError` when it fails, is late or prints something else."""
    arguments = [str(run.page_bytes), str(run.region_bytes), str(run.num_rounds)]
    name = Path(command[-1]).name
    try:
        finished = subprocess.run(
            [*command, *arguments],
            env=child_environment(**variables),
            capture_output=True,
            text=True,
            timeout=PROGRAM_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InternalError(f"{name} did not end within {PROGRAM_DEADLINE_S:.0f} s") from None
    if finished.returncode != 0:
        raise InternalError(f"{name} failed with exit code {finished.returncode}: {finished.stderr.strip()[-500:]}")
    try:
        result = msgspec.json.decode(finished.stdout.strip().rpartition("\n")[2], type=ProgramResult)
    except msgspec.DecodeError as error:
        raise InternalError(f"{name} printed no result: {error}") from error
    return result.num_bytes / result.elapsed_ns

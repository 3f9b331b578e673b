"""A deployment on one machine: what `pdserve serve` is asked for, and the workers that come of it."""

from dataclasses import dataclass

from pdserve.config.cores import share_of_cpus
from pdserve.config.role import Role
from pdserve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRequest:
    num_prefill: int
    num_decode: int
    num_colocated: int
    available_cpus: tuple[int, ...]
    prefill_tp: int = 1
    """Tensor parallel size of each prefill worker."""
    decode_tp: int = 1
    """Of each decode and colocated worker, and of each of its data parallel ranks."""
    decode_dp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """One worker of the deployment, its shape, and the cores it is pinned to."""

    name: str
    role: Role
    cpus: tuple[int, ...]
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1


def place_workers(request: DeploymentRequest) -> tuple[WorkerPlace, ...]:
    """Each worker with its own cores, in equal runs; workers share cores only when there are more workers than cores.

    Raises: `ConfigError` when no worker could decode, or a prefill worker would have nobody to prefill for.
    """
    counts = (request.num_prefill, request.num_decode, request.num_colocated)
    if min(counts) < 0:
        raise ConfigError("--prefill, --decode and --colocated must not be negative")
    if min(request.prefill_tp, request.decode_tp, request.decode_dp) < 1:
        raise ConfigError("--prefill-tp, --decode-tp and --decode-dp must be 1 or more")
    if request.num_decode + request.num_colocated == 0:
        raise ConfigError("no worker would decode: give --decode 1 or more, or --colocated 1 or more")
    if request.num_prefill and not request.num_decode:
        raise ConfigError("prefill workers need a decode worker to write to: give --decode 1 or more")
    roles = [
        *((Role.PREFILL, f"prefill-{index}") for index in range(request.num_prefill)),
        *((Role.DECODE, f"decode-{index}") for index in range(request.num_decode)),
        *((Role.BOTH, f"colocated-{index}") for index in range(request.num_colocated)),
    ]
    cpus, num_shares = request.available_cpus, len(roles)
    return tuple(
        WorkerPlace(
            name=name,
            role=role,
            cpus=share_of_cpus(cpus, index=index, num_shares=num_shares),
            tensor_parallel_size=request.prefill_tp if role is Role.PREFILL else request.decode_tp,
            data_parallel_size=1 if role is Role.PREFILL else request.decode_dp,
        )
        for index, (role, name) in enumerate(roles)
    )

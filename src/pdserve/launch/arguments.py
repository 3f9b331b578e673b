"""The command lines of a deployment's gateway and workers, as far as every kind of deployment has them alike."""

from collections.abc import Sequence

from pdserve.config.deployment import WorkerPlace


def gateway_arguments(
    *, model_dir: str, model_name: str, host: str, port: int, cpus: Sequence[int], drain_timeout_s: float
) -> tuple[str, ...]:
    """Of `pdserve gateway`; without `cpus` it is not pinned."""
    where = ("--host", host, "--port", str(port), "--drain-timeout", str(drain_timeout_s))
    return ("gateway", "--model-dir", model_dir, "--model-name", model_name, *where, *_pinning(cpus))


def worker_arguments(
    place: WorkerPlace, *, model_dir: str, model_name: str, join_url: str, drain_timeout_s: float
) -> tuple[str, ...]:
    """Of `pdserve worker`, for a worker that serves at any free port of loopback if nothing else is added."""
    return (
        *("worker", "--role", place.role.value, "--name", place.name, "--join", join_url),
        *("--model-dir", model_dir, "--model-name", model_name),
        *("--tensor-parallel-size", str(place.tensor_parallel_size)),
        *("--data-parallel-size", str(place.data_parallel_size)),
        *("--drain-timeout", str(drain_timeout_s)),
        *_pinning(place.cpus),
    )


def _pinning(cpus: Sequence[int]) -> tuple[str, ...]:
    return ("--cpus", ",".join(map(str, cpus))) if cpus else ()

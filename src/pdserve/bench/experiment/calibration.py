"""A matrix product of fixed extents on one core: whether the machine is as fast as it was.

Run as a program, `python -m pdserve.bench.experiment.calibration CORE` prints the seconds of the fastest of many: what
a neighbour on the host does for a second hits some of them, a slower core all.
"""

import asyncio
import os
import sys
import time
from collections.abc import Sequence

import numpy as np

from pdserve.config.environment import child_environment
from pdserve.errors import InternalError
from pdserve.units import NS_PER_S

ROWS, INNER, COLUMNS = 256, 576, 1536
"""A pass of 256 tokens through the first feed-forward matrix of the default model: a few milliseconds."""

WINDOW_S = 3.0
"""An idle core of a virtual machine was seen to be 1.4 times as slow for up to 2 s, a third of the time."""

DEADLINE_S = 60.0


async def gemms_s(cpus: Sequence[int]) -> tuple[float, ...]:
    """One core after the other. Raises: as `gemm_s`."""
    return tuple([await gemm_s(cpu) for cpu in cpus])


async def gemm_s(cpu: int) -> float:
    """In a process of its own, pinned to the core. Raises: `InternalError` when it fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "pdserve.bench.experiment.calibration",
        str(cpu),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=child_environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1"),
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise InternalError(f"the calibration on core {cpu} did not end within {DEADLINE_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise InternalError(f"the calibration on core {cpu} ended with exit status {process.returncode}")
    return float(output)


def fastest_product_s() -> float:
    left = np.full((ROWS, INNER), 0.5, dtype=np.float32)
    right = np.full((INNER, COLUMNS), 0.25, dtype=np.float32)
    product = np.empty((ROWS, COLUMNS), dtype=np.float32)
    fastest_ns, began_ns = sys.maxsize, time.monotonic_ns()
    while (started_ns := time.monotonic_ns()) < began_ns + WINDOW_S * NS_PER_S:
        np.matmul(left, right, out=product)
        fastest_ns = min(fastest_ns, time.monotonic_ns() - started_ns)
    return fastest_ns / NS_PER_S


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[1])})
    print(fastest_product_s())

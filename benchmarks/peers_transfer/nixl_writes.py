"""Page writes with NIXL over UCX between two processes: prepared descriptor lists, one notification a round.

UCX chooses its transport by UCX_TLS: unset it takes shared memory, with `tcp` sockets. A round has ended when the
sender sees it done, which for UCX means that the target has it.
"""

import importlib
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from page_run import PageRun, measure

DRAM_DEVICE = 0


def new_agent(name: str) -> Any:
    nixl: Any = importlib.import_module("nixl_cu12._api")
    return nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))


def page_descriptors(run: PageRun, address: int) -> list[tuple[int, int, int]]:
    return [(address + int(offset), run.page_bytes, DRAM_DEVICE) for offset in run.offsets]


def hold_target(run: PageRun, pipe: Connection) -> None:
    region = run.new_target()
    agent = new_agent("target")
    registration = agent.register_memory([(region.ctypes.data, region.nbytes, DRAM_DEVICE, "")], "DRAM")
    pipe.send((agent.get_agent_metadata(), region.ctypes.data))
    pipe.recv()
    pipe.send(run.is_written(region))
    agent.deregister_memory(registration)


def write_round(agent: Any, transfer: Any) -> None:
    state = agent.transfer(transfer)
    while state == "PROC":
        state = agent.check_xfer_state(transfer)
    if state != "DONE":
        raise SystemExit(f"NIXL ended a transfer as {state}")


def write_pages(run: PageRun, pipe: Connection) -> int:
    """Nanoseconds that all rounds took."""
    region = run.new_source()
    agent = new_agent("source")
    registration = agent.register_memory([(region.ctypes.data, region.nbytes, DRAM_DEVICE, "")], "DRAM")
    metadata, target_address = pipe.recv()
    target = agent.add_remote_agent(metadata)
    local = agent.prep_xfer_dlist("", page_descriptors(run, region.ctypes.data), "DRAM")
    remote = agent.prep_xfer_dlist(target, page_descriptors(run, target_address), "DRAM")
    indices = np.arange(len(run.offsets), dtype=np.int32)
    agent.make_connection(target)
    transfer = agent.make_prepped_xfer("WRITE", local, indices, remote, indices, b"round")
    write_round(agent, transfer)
    start_ns = time.monotonic_ns()
    for _ in range(run.num_rounds):
        write_round(agent, transfer)
    elapsed_ns = time.monotonic_ns() - start_ns
    for handle in (transfer, local, remote):
        handle.release()
    agent.deregister_memory(registration)
    return elapsed_ns


if __name__ == "__main__":
    measure("nixl_ucx", description=__doc__, hold_target=hold_target, write_pages=write_pages)
    # NIXL 1.5.1 ends with a segmentation fault in what runs at exit, after everything was released.
    os._exit(0)

"""Page writes with Mooncake's transfer engine over TCP between two processes, in batches of `PAGES_PER_BATCH`."""

import importlib
import time
from multiprocessing.connection import Connection
from typing import Any

from page_run import PageRun, measure

# Batches over 1,024 pages return -1 after having written a part.
PAGES_PER_BATCH = 128


def new_engine() -> Any:
    engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("Mooncake's transfer engine did not start")
    return engine


def hold_target(run: PageRun, pipe: Connection) -> None:
    region = run.new_target()
    engine = new_engine()
    engine.register_memory(region.ctypes.data, region.nbytes)
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", region.ctypes.data))
    pipe.recv()
    pipe.send(run.is_written(region))


def write_pages(run: PageRun, pipe: Connection) -> int:
    """Nanoseconds that all rounds took."""
    region = run.new_source()
    engine = new_engine()
    engine.register_memory(region.ctypes.data, region.nbytes)
    target_name, target_address = pipe.recv()
    sources = [region.ctypes.data + int(offset) for offset in run.offsets]
    targets = [target_address + int(offset) for offset in run.offsets]

    def write_round() -> None:
        for start in range(0, len(sources), PAGES_PER_BATCH):
            batch = slice(start, start + PAGES_PER_BATCH)
            lengths = [run.page_bytes] * len(sources[batch])
            if engine.batch_transfer_sync_write(target_name, sources[batch], targets[batch], lengths) != 0:
                raise SystemExit("Mooncake failed to write a batch")

    write_round()
    start_ns = time.monotonic_ns()
    for _ in range(run.num_rounds):
        write_round()
    return time.monotonic_ns() - start_ns


if __name__ == "__main__":
    measure("mooncake_tcp", description=__doc__, hold_target=hold_target, write_pages=write_pages)

"""What the peers share: the two processes, the order of pages, the line printed; as native/bench/page_run.h."""

import argparse
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

SOURCE_FILL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRun:
    page_bytes: int
    num_pages: int
    num_rounds: int

    @property
    def region_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def offsets(self) -> NDArray[np.uint64]:
        """Where each page starts in its region, in the order in which a round writes them."""
        order = np.random.default_rng(0).permutation(self.num_pages)
        return (order * self.page_bytes).astype(np.uint64)

    def new_source(self) -> NDArray[np.uint8]:
        return np.full(self.region_bytes, SOURCE_FILL, dtype=np.uint8)

    def new_target(self) -> NDArray[np.uint8]:
        return np.full(self.region_bytes, 0, dtype=np.uint8)

    def is_written(self, target: NDArray[np.uint8]) -> bool:
        return bool((target == SOURCE_FILL).all())


def parse_page_run(description: str | None) -> PageRun:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("page_bytes", type=int)
    parser.add_argument("region_bytes", type=int)
    parser.add_argument("rounds", type=int)
    arguments = parser.parse_args()
    num_pages = arguments.region_bytes // arguments.page_bytes
    return PageRun(page_bytes=arguments.page_bytes, num_pages=num_pages, num_rounds=arguments.rounds)


def measure(
    name: str,
    *,
    description: str | None,
    hold_target: Callable[[PageRun, Connection], None],
    write_pages: Callable[[PageRun, Connection], int],
) -> None:
    """Run both sides, print the result. `hold_target` is told when all is written and answers whether that is so."""
    run = parse_page_run(description)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    target = context.Process(target=hold_target, args=(run, theirs), daemon=True)
    target.start()
    elapsed_ns = write_pages(run, ours)
    ours.send("written")
    if not ours.recv():
        raise SystemExit("the target does not hold what was written")
    target.join()
    num_bytes = run.region_bytes * run.num_rounds
    result = {"name": name, "page_bytes": run.page_bytes, "num_bytes": num_bytes, "elapsed_ns": elapsed_ns}
    print(json.dumps(result), flush=True)

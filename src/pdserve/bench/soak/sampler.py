"""Looks at every process of a fleet now and then: at what the kernel says of it, and at its ledger."""

import asyncio
import time

import aiohttp

from pdserve.bench.faults.fleet import GATEWAY, Fleet
from pdserve.bench.procfs import descendants_of, process_stats
from pdserve.bench.soak.process_figures import ProcessFigures, read_figures
from pdserve.bench.soak.samples import IdleFigures, IdlePoint, LedgerHistory, Life
from pdserve.units import ns_to_seconds


class Sampler:
    """Threads: the event loop's only."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._started_ns = time.monotonic_ns()
        self._lives: dict[int, Life] = {}
        self._histories: dict[str, LedgerHistory] = {}
        self.idle_points: list[IdlePoint] = []
        self.is_loaded = False
        self._rss_bytes = 0

    @property
    def at_s(self) -> float:
        return ns_to_seconds(time.monotonic_ns() - self._started_ns)

    @property
    def lives(self) -> list[Life]:
        return list(self._lives.values())

    @property
    def histories(self) -> list[LedgerHistory]:
        return list(self._histories.values())

    @property
    def rss_bytes(self) -> int:
        """Of all processes together, when they were last looked at; what they share is in it several times."""
        return self._rss_bytes

    async def run(self, *, every_s: float) -> None:
        """Until cancelled."""
        while True:
            self._sample()
            await self._read_ledgers()
            await asyncio.sleep(every_s)

    async def take_idle_point(self, *, timeout_s: float) -> None:
        """Waits until nothing is left of any request."""
        owned = await self._fleet.until_idle(timeout_s=timeout_s)
        processes = {
            name: IdleFigures(
                pid=pid,
                num_fds=figures.num_fds,
                num_threads=figures.num_threads,
                shared_bytes=figures.shared_bytes,
            )
            for name, pid, figures in self._processes()
        }
        self.idle_points.append(IdlePoint(at_s=round(self.at_s, 1), processes=processes, owned=tuple(owned)))

    def _sample(self) -> None:
        at_s = self.at_s
        processes = self._processes()
        self._rss_bytes = sum(figures.rss_bytes for _, _, figures in processes)
        for name, pid, figures in processes:
            life = self._lives.setdefault(pid, Life(name=name, pid=pid))
            life.at_s.append(round(at_s, 1))
            life.is_loaded.append(self.is_loaded)
            life.rss_bytes.append(figures.rss_bytes)
            life.shared_rss_bytes.append(figures.shared_rss_bytes)
            life.num_fds.append(figures.num_fds)
            life.num_threads.append(figures.num_threads)
            life.shared_bytes.append(figures.shared_bytes)

    def _processes(self) -> list[tuple[str, int, ProcessFigures]]:
        """Every process that runs, with its name: a worker's ranks are `NAME/rank-INDEX`."""
        found: list[tuple[str, int, ProcessFigures]] = []
        stats = process_stats()
        for name in filter(self._fleet.is_running, self._fleet.names):
            pid = self._fleet.pid(name)
            below = [(f"{name}/rank-{index}", child) for index, child in enumerate(descendants_of(pid, stats))]
            for process_name, process_id in [(name, pid), *below]:
                if (figures := read_figures(process_id)) is not None:
                    found.append((process_name, process_id, figures))
        return found

    async def _read_ledgers(self) -> None:
        """Of those that answer: who is frozen or starting says nothing."""
        awake = [name for name in self._fleet.names if self._fleet.is_running(name) and not self._fleet.is_frozen(name)]
        await asyncio.gather(*(self._read_ledger(name) for name in awake))

    async def _read_ledger(self, name: str) -> None:
        try:
            ledger = await self._fleet.ledger(name)
        except (aiohttp.ClientError, TimeoutError):
            return
        ranks = ledger.get("ranks", [])
        owners = ledger["requests"] if name == GATEWAY else [owner for rank in ranks for owner in rank["owners"]]
        history = self._histories.setdefault(name, LedgerHistory(name=name))
        history.at_s.append(round(self.at_s, 1))
        history.num_owners.append(len(owners))
        history.num_used_pages.append(sum(rank["num_pages"] - rank["num_free_pages"] for rank in ranks))
        history.leaks += [f"{leak['kind']}: {leak['message']}" for leak in ledger["leaks"]]

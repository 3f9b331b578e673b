"""The run: answers recorded in peace, then rounds of load and faults, each followed by a look at what is left."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from pdserve.bench.faults.fleet import GATEWAY, Fleet, FleetSettings, running_fleet
from pdserve.bench.provenance import this_commit, this_machine
from pdserve.bench.semantics.case import Outcome
from pdserve.bench.soak.client import client_of
from pdserve.bench.soak.disturber import Disturber
from pdserve.bench.soak.fault_plan import choose_targets, fault_plan
from pdserve.bench.soak.judgement import Ending
from pdserve.bench.soak.load import Tally, record, run_clients
from pdserve.bench.soak.mix import LoadKind
from pdserve.bench.soak.result import KindRow, SoakResult
from pdserve.bench.soak.sampler import Sampler
from pdserve.bench.soak.verdict import Counts, findings, idle_growths, leaks_in, memory_growths
from pdserve.bench.waiting import is_set_within
from pdserve.config import environment
from pdserve.units import MIB

IDLE_TIMEOUT_S = 60.0
PROGRESS_EVERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakSettings:
    fleet: FleetSettings
    mix: tuple[LoadKind, ...]
    duration_s: float
    num_rounds: int
    """All must be idle after each."""
    num_clients: int
    seed: int
    lease_s: float
    """Of the fleet's workers."""
    fault_gap_s: tuple[float, float]
    """The least and the most between a recovery and the next fault."""
    sample_every_s: float


async def soak(settings: SoakSettings, stop: asyncio.Event, *, say: Callable[[str], None]) -> SoakResult:
    """Ends early when `stop` is set.

    Raises: `ConfigError` when a process does not start, `InternalError` when an undisturbed answer is wrong.
    """
    async with running_fleet(settings.fleet, on_progress=say) as fleet:
        async with client_of(fleet.url, api_key=environment.api_key()) as client:
            recorded = await record(client, settings.mix, until=stop)
        say(f"recorded {len(recorded)} answers")
        run = _Run(settings, fleet, recorded, stop, say)
        await run.run()
        return run.result()


class _Run:
    def __init__(
        self,
        settings: SoakSettings,
        fleet: Fleet,
        recorded: Mapping[str, Outcome],
        stop: asyncio.Event,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._recorded = recorded
        self._stop = stop
        self._say = say
        self._random = Random(settings.seed)
        self._tally = Tally()
        self._sampler = Sampler(fleet)
        workers = [(place.name, place.role) for place in settings.fleet.places]
        faults = fault_plan(
            choose_targets(workers, gateway=GATEWAY),
            seed=settings.seed,
            lease_s=settings.lease_s,
            gap_s=settings.fault_gap_s,
        )
        self._disturber = Disturber(fleet, faults)

    async def run(self) -> None:
        await self._sampler.take_idle_point(timeout_s=IDLE_TIMEOUT_S)
        async with asyncio.TaskGroup() as group:
            watching = [
                group.create_task(self._sampler.run(every_s=self._settings.sample_every_s)),
                group.create_task(self._report_progress()),
            ]
            for _ in range(self._settings.num_rounds):
                if not self._stop.is_set():
                    await self._round()
            for task in watching:
                task.cancel()

    async def _round(self) -> None:
        """Load and faults, then peace until nothing is left."""
        over = asyncio.Event()
        self._sampler.is_loaded = True
        async with client_of(self._fleet.url, api_key=environment.api_key()) as client, asyncio.TaskGroup() as group:
            load = run_clients(
                client,
                self._settings.mix,
                self._recorded,
                self._tally,
                num_clients=self._settings.num_clients,
                random=self._random,
                until=over,
            )
            group.create_task(load)
            group.create_task(self._disturber.run(over))
            if await is_set_within(self._stop, self._settings.duration_s / self._settings.num_rounds):
                self._say("stopping: the last requests and the last fault come to their ends")
            over.set()
        self._sampler.is_loaded = False
        if not self._stop.is_set():
            await self._sampler.take_idle_point(timeout_s=IDLE_TIMEOUT_S)

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            tally = self._tally
            self._say(
                f"{self._sampler.at_s / 60:.1f} of {self._settings.duration_s / 60:g} minutes: "
                f"requests={tally.num_requests} failed={dict(tally.codes)} faults={self._disturber.counts.total()} "
                f"wrong={tally.count(Ending.WRONG)} hung={tally.count(Ending.HUNG)} "
                f"rss={self._sampler.rss_bytes / MIB:.0f} MiB"
            )

    def result(self) -> SoakResult:
        tally, sampler = self._tally, self._sampler
        idle = idle_growths(sampler.idle_points)
        growths = memory_growths(sampler.lives, run_s=sampler.at_s)
        leaks = leaks_in(sampler.histories, sampler.idle_points)
        counts = Counts(requests=tally.num_requests, wrong=tally.count(Ending.WRONG), hung=tally.count(Ending.HUNG))
        return SoakResult(
            machine=this_machine(),
            commit=this_commit(),
            model=self._settings.fleet.model_name,
            seed=self._settings.seed,
            duration_s=round(sampler.at_s, 1),
            was_interrupted=self._stop.is_set(),
            num_clients=self._settings.num_clients,
            num_requests=counts.requests,
            num_wrong=counts.wrong,
            num_hung=counts.hung,
            kinds=[KindRow(kind=kind.name, endings=tally.endings_of(kind)) for kind in self._settings.mix],
            codes=dict(tally.codes),
            faults={kind.value: number for kind, number in self._disturber.counts.items()},
            growths=growths,
            idle_growths=idle,
            leaks=leaks,
            problems=[*tally.problems, *self._disturber.problems],
            findings=findings(counts, growths, idle, leaks, self._disturber.problems),
            idle_points=sampler.idle_points,
            ledgers=sampler.histories,
            lives=sampler.lives,
        )

"""The workers of a fleet and their gateway on one virtual clock."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from pdserve.clock import VirtualClock
from pdserve.config.role import Role
from pdserve.errors import ConfigError
from pdserve.ids import Incarnation
from pdserve.perfmodel.port import PerfModel
from pdserve.simulate.agenda import Action, Agenda
from pdserve.simulate.fleet.gateway import FleetGateway
from pdserve.simulate.fleet.plan import FleetPlan
from pdserve.simulate.fleet.result import FleetResult
from pdserve.simulate.fleet.tally import Tally
from pdserve.simulate.fleet.worker import FleetGround, FleetWorker
from pdserve.units import NS_PER_S, seconds_to_ns
from pdserve.workload.request import WorkloadRequest

TIME_STEP_NS = NS_PER_S
"""How often deadlines are looked at; they are minutes long."""

EVENTS_A_LOOK = 500
"""Some tens of milliseconds."""

Watch = Callable[[int], bool]
"""Told now and then how many requests have ended; False: the simulation ends here."""


def go_on(num_ended: int) -> bool:
    """A `Watch` that lets it run to the end."""
    del num_ended
    return True


class FleetWorld:
    def __init__(self, plan: FleetPlan, workload: Iterable[WorkloadRequest], perf: Mapping[Role, PerfModel]) -> None:
        """Raises: `ConfigError` when a pool has no performance model."""
        self._plan = plan
        self._workload = iter(workload)
        self._clock = VirtualClock()
        self._agenda = Agenda(self._clock)
        self._tally = Tally()
        self._gateway = FleetGateway(plan, self._agenda, self._tally)
        self._workers: dict[Incarnation, FleetWorker] = {}
        ground = FleetGround(
            plan=plan,
            agenda=self._agenda,
            fabrics=[],
            workers=self._workers,
            to_gateway=self._gateway.hear,
            on_exposed=self._gateway.expose,
        )
        for role, pool in plan.pools.items():
            if role not in perf:
                raise ConfigError(f"no performance model for the {role.value} workers; give one for each pool")
            for _ in range(pool.num_workers):
                incarnation = Incarnation(len(self._workers) + 1)
                self._workers[incarnation] = FleetWorker(ground, incarnation, role, perf[role])
        for worker in self._workers.values():
            self._gateway.add(worker)
        self._has_all_arrived = False
        self._last_arrival_ns = 0
        self._busy_ns: dict[Role, int] = {}
        """Of each pool, until the last arrival."""

    def run(self, watch: Watch) -> FleetResult:
        """To the end of the last request, or until `watch` has seen enough."""
        self._schedule_beats()
        self._await_arrival()
        agenda, clock, tally = self._agenda, self._clock, self._tally
        num_events = 0
        while not self._has_all_arrived or tally.num_open:
            due_ns = agenda.next_ns
            if due_ns is None:
                break
            clock.advance_ns(due_ns - clock.now_ns())
            agenda.do_next()
            num_events += 1
            if num_events % EVENTS_A_LOOK == 0 and not watch(tally.num_ended):
                break
        if not self._has_all_arrived:
            self._note_last_arrival()
        return tally.result(utilisation=self._utilisation(), span_ns=clock.now_ns())

    def _await_arrival(self) -> None:
        request = next(self._workload, None)
        if request is None:
            self._has_all_arrived = True
            self._note_last_arrival()
            return
        delay_ns = seconds_to_ns(request.arrival_s) - self._agenda.now_ns
        self._agenda.after(max(0, delay_ns), partial(self._arrive, request))

    def _note_last_arrival(self) -> None:
        """It was now, or nobody waits for it any more."""
        self._last_arrival_ns = self._agenda.now_ns
        self._busy_ns = {role: self._busy_ns_of(role) for role in self._plan.pools}

    def _arrive(self, request: WorkloadRequest) -> None:
        self._gateway.submit(request)
        self._await_arrival()

    def _schedule_beats(self) -> None:
        """Heartbeats spread over their period, as those of workers that started one after another."""
        period_ns = seconds_to_ns(self._plan.heartbeat_s)
        for index, worker in enumerate(self._workers.values()):
            self._every(
                period_ns, partial(self._gateway.on_heartbeat, worker), first_ns=period_ns * index // len(self._workers)
            )
            self._every(TIME_STEP_NS, worker.on_time, first_ns=TIME_STEP_NS * index // len(self._workers))
        self._every(TIME_STEP_NS, self._gateway.on_time, first_ns=TIME_STEP_NS)

    def _every(self, period_ns: int, action: Action, *, first_ns: int) -> None:
        def beat() -> None:
            action()
            self._agenda.after(period_ns, beat)

        self._agenda.after(first_ns, beat)

    def _busy_ns_of(self, role: Role) -> int:
        return sum(worker.busy_ns() for worker in self._workers.values() if worker.role is role)

    def _utilisation(self) -> dict[Role, float]:
        """Of the time until the last arrival; a fleet that drains says nothing of its load."""
        return {
            role: self._busy_ns[role] / (pool.num_workers * pool.num_ranks * max(1, self._last_arrival_ns))
            for role, pool in self._plan.pools.items()
        }

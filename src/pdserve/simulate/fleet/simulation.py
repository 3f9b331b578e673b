"""From a plan, a load and a performance model to what clients would see."""

from collections.abc import Iterable, Mapping

from pdserve.config.role import Role
from pdserve.perfmodel.port import PerfModel
from pdserve.simulate.fleet.plan import FleetPlan
from pdserve.simulate.fleet.result import FleetResult
from pdserve.simulate.fleet.world import FleetWorld, Watch, go_on
from pdserve.workload.request import WorkloadRequest


def simulate_fleet(
    plan: FleetPlan, workload: Iterable[WorkloadRequest], perf: Mapping[Role, PerfModel], *, watch: Watch = go_on
) -> FleetResult:
    """What becomes of each request; the same arguments give the same result.

    `workload` is read as time passes, in the order of arrival. `perf` has a model for each pool of the plan.
    `watch` may end it early: then the result is of the requests that have ended.
    Raises: `ConfigError` when a model is missing.
    """
    return FleetWorld(plan, workload, perf).run(watch)

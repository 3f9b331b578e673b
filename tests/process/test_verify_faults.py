"""A few cases of `pdserve verify-faults`, on the smallest fleet that has them and a tiny model."""

from collections.abc import AsyncGenerator

import aiohttp
import pytest
import pytest_asyncio

from pdserve.bench.faults.case_run import CaseRun, Question, undisturbed
from pdserve.bench.faults.cases import PUSHING, SEALED, Case, Fault, Moment, Victim
from pdserve.bench.faults.fleet import Fleet, FleetSettings, running_fleet
from pdserve.bench.tiny_models import prepare_tiny
from pdserve.config.deployment import WorkerPlace
from pdserve.config.role import Role
from pdserve.errors import ConfigError

pytestmark = pytest.mark.asyncio(loop_scope="session")

LEASE_S = 4.0
SUBJECT = Question(prompt=tuple(range(100, 300)), max_tokens=4)
BYSTANDER = Question(prompt=tuple(range(300, 320)), max_tokens=8)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet() -> AsyncGenerator[Fleet]:
    """One worker of each role."""
    settings = FleetSettings(
        model_dir=str(prepare_tiny("tiny-deepseek")),
        model_name="tiny-deepseek",
        places=(
            WorkerPlace(name="prefill-0", role=Role.PREFILL, cpus=()),
            WorkerPlace(name="decode-0", role=Role.DECODE, cpus=()),
        ),
        worker_arguments=(
            *("--chunk-tokens", "32", "--max-running", "16", "--kv-tokens", "1024", "--threads", "1"),
            *("--lease", f"{LEASE_S:g}", "--allow-stop-at", "--log-level", "error"),
        ),
        gateway_arguments=("--log-level", "error"),
    )
    async with running_fleet(settings) as running:
        yield running


@pytest.mark.parametrize(("fault", "moment"), [(Fault.PAUSE, SEALED), (Fault.RESTART, PUSHING)])
async def test_fault_of_a_prefill_worker_at_a_state_changes_no_answer(
    fleet: Fleet, fault: Fault, moment: Moment
) -> None:
    before = fleet.pid("prefill-0")
    async with aiohttp.ClientSession() as session:
        subject, bystander = [await undisturbed(fleet, session, question) for question in (SUBJECT, BYSTANDER)]
        case = Case(victim=Victim.PREFILL, fault=fault, moment=moment)
        run = CaseRun(case, fleet, session, subject=subject, bystanders=[bystander], lease_s=LEASE_S)
        result = await run.run()
    assert result.findings == []
    assert (fleet.pid("prefill-0") == before) is (fault is Fault.PAUSE)


async def test_worker_refuses_to_stop_at_a_state_of_the_other_side(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match=r"prefill-0 refuses .*: 400 'granted' is no state"):
        await fleet.stop_at("prefill-0", "granted")


async def test_process_that_stands_still_is_not_taken_for_idle(fleet: Fleet) -> None:
    fleet.freeze("decode-0")
    try:
        assert await fleet.until_idle(timeout_s=0.1) != []
    finally:
        fleet.thaw("decode-0")
    assert await fleet.until_idle() == []

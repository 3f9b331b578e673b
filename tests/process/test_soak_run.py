"""A soak of some seconds on real processes with a tiny model: answers stay right while workers die, nothing is left."""

import asyncio

from pdserve.bench.faults.fleet import FleetSettings
from pdserve.bench.handoff_check import NATURAL_TEXT
from pdserve.bench.semantics.completions import Texts
from pdserve.bench.soak.mix import load_mix
from pdserve.bench.soak.soak import SoakSettings, soak
from pdserve.bench.tiny_models import TINY_EAGLE_MODEL, prepare_tiny
from pdserve.config.deployment import DeploymentRequest, place_workers
from pdserve.text.tokenizer import Tokenizer

LEASE_S = 4.0
KINDS = {"several choices", "stop string", "client leaves", "refused"}


async def test_soak_of_some_seconds_has_right_answers_and_leaves_nothing() -> None:
    model_dir = prepare_tiny(TINY_EAGLE_MODEL)
    places = place_workers(DeploymentRequest(num_prefill=1, num_decode=1, num_colocated=0, available_cpus=()))
    texts = Texts.of(NATURAL_TEXT.read_text(), Tokenizer.load(model_dir))
    settings = SoakSettings(
        fleet=FleetSettings(
            model_dir=str(model_dir),
            model_name=TINY_EAGLE_MODEL,
            places=places,
            worker_arguments=("--kv-tokens", "2048", "--lease", str(LEASE_S), "--drain-timeout", "10"),
        ),
        mix=tuple(kind for kind in load_mix(texts) if kind.name in KINDS),
        duration_s=2.0,
        num_rounds=2,
        num_clients=3,
        seed=3,
        lease_s=LEASE_S,
        fault_gap_s=(0.1, 0.2),
        sample_every_s=0.5,
    )
    result = await soak(settings, asyncio.Event(), say=print)
    assert result.num_requests > 0 and result.num_faults >= 2
    assert (result.num_wrong, result.num_hung, result.leaks, result.problems) == (0, 0, [], [])
    assert {life.name for life in result.lives} >= {"gateway", "prefill-0", "prefill-0/rank-0", "decode-0"}
    assert len(result.idle_points) == 1 + settings.num_rounds

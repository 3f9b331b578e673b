"""Small fleets and loads for the tests of the simulator at fleet scale."""

import random

from pdserve.config.role import Role
from pdserve.perfmodel.fitted import FittedModel, affine_model
from pdserve.perfmodel.port import PerfModel
from pdserve.simulate.fleet.plan import FleetPlan, PoolPlan
from pdserve.simulate.fleet.result import FleetResult
from pdserve.simulate.fleet.simulation import simulate_fleet
from pdserve.workload.request import WorkloadRequest

SWIFT = affine_model(
    provenance="a test",
    pass_s=5e-3,
    token_s=1e-4,
    decode_token_s=1e-4,
    decode_key_s=1e-8,
    push_s=1e-5,
    push_byte_s=1e-10,
)


def pool(num_workers: int, *, num_ranks: int = 1, chunk_tokens: int = 2048, kv_tokens: int = 16_384) -> PoolPlan:
    return PoolPlan(num_workers=num_workers, num_ranks=num_ranks, chunk_tokens=chunk_tokens, kv_tokens=kv_tokens)


def apart(num_prefill: int, num_decode: int, *, num_ranks: int = 1) -> FleetPlan:
    return FleetPlan(pools={Role.PREFILL: pool(num_prefill), Role.DECODE: pool(num_decode, num_ranks=num_ranks)})


def together(num_workers: int, *, chunk_tokens: int = 2048) -> FleetPlan:
    return FleetPlan(pools={Role.BOTH: pool(num_workers, chunk_tokens=chunk_tokens)})


def poisson(
    num_requests: int, rate_per_s: float, *, num_prompt_tokens: int = 200, num_output_tokens: int = 20, seed: int = 0
) -> list[WorkloadRequest]:
    draw = random.Random(seed)
    arrival_s = 0.0
    requests: list[WorkloadRequest] = []
    for _ in range(num_requests):
        arrival_s += draw.expovariate(rate_per_s)
        requests.append(
            WorkloadRequest(
                arrival_s=arrival_s, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens
            )
        )
    return requests


def run(plan: FleetPlan, load: list[WorkloadRequest], perf: FittedModel = SWIFT) -> FleetResult:
    models: dict[Role, PerfModel] = dict.fromkeys(Role, perf)
    return simulate_fleet(plan, load, models)

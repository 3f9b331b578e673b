"""How many requests a second a fleet could answer if its pools were always busy: a bound, known without simulating."""

from collections.abc import Mapping

from pdserve.config.role import Role
from pdserve.perfmodel.port import PassShape, PerfModel
from pdserve.simulate.fleet.plan import FleetPlan, PoolPlan
from pdserve.units import div_ceil


def capacity_per_s(
    plan: FleetPlan, perf: Mapping[Role, PerfModel], *, num_prompt_tokens: int, num_output_tokens: int
) -> float:
    """Of the pool that is full first, for requests that are all alike, where prefill workers prefill for all others."""
    num_decoded_a_s = 0.0
    num_prefilled_a_s = float("inf")
    for role, pool in plan.pools.items():
        prefill_s = _prefill_s(pool, perf[role], num_prompt_tokens) if role is not Role.DECODE else 0.0
        num_ranks = pool.num_workers * pool.num_ranks
        if role is Role.PREFILL:
            num_prefilled_a_s = num_ranks / prefill_s
        else:
            token_s = _decode_s(pool, perf[role], num_prompt_tokens + num_output_tokens)
            num_decoded_a_s += num_ranks / (prefill_s + token_s * num_output_tokens)
    return min(num_decoded_a_s, num_prefilled_a_s)


def _prefill_s(pool: PoolPlan, perf: PerfModel, num_tokens: int) -> float:
    """Of one prompt, in passes of its own."""
    num_passes = div_ceil(num_tokens, pool.chunk_tokens)
    num_keys = num_tokens * (num_tokens + 1) // 2
    shape = PassShape(num_prefill_tokens=num_tokens // num_passes, num_prefill_keys=num_keys // num_passes)
    return num_passes * perf.pass_s(shape)


def _decode_s(pool: PoolPlan, perf: PerfModel, num_keys: int) -> float:
    """Of one token, in a pass with as many others as fit."""
    num_sequences = max(1, min(pool.max_running, pool.kv_tokens // num_keys))
    shape = PassShape(num_decode_tokens=num_sequences, num_decode_keys=num_sequences * num_keys)
    return perf.pass_s(shape) / num_sequences

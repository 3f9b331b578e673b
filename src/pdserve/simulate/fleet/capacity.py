"""How many requests a second a fleet could answer if its pools were always busy: a bound, known without simulating."""

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

from pdserve.config.role import Role
from pdserve.perfmodel.port import PassShape, PerfModel
from pdserve.simulate.fleet.drafting import Drafting
from pdserve.simulate.fleet.plan import FleetPlan, PoolPlan
from pdserve.units import div_ceil


def capacity_per_s(
    plan: FleetPlan, perf: Mapping[Role, PerfModel], *, num_prompt_tokens: int, num_output_tokens: int
) -> float:
    """Of the pool that is full first, for requests that are all alike, where prefill workers prefill for all others."""
    num_decoded_a_s = 0.0
    num_prefilled_a_s = float("inf")
    for role, pool in plan.pools.items():
        prefill_s = _prefill_s(plan, pool, perf[role], num_prompt_tokens) if role is not Role.DECODE else 0.0
        num_ranks = pool.num_workers * pool.num_ranks
        if role is Role.PREFILL:
            num_prefilled_a_s = num_ranks / prefill_s
        else:
            token_s = _decode_s(plan, pool, perf[role], num_prompt_tokens + num_output_tokens)
            num_decoded_a_s += num_ranks / (prefill_s + token_s * num_output_tokens)
    return min(num_decoded_a_s, num_prefilled_a_s)


def _prefill_s(plan: FleetPlan, pool: PoolPlan, perf: PerfModel, num_tokens: int) -> float:
    """Of one prompt, in passes of its own."""
    num_passes = div_ceil(num_tokens, pool.chunk_tokens)
    num_keys = num_tokens * (num_tokens + 1) // 2
    shape = PassShape(num_prefill_tokens=num_tokens // num_passes, num_prefill_keys=num_keys // num_passes)
    return num_passes * _mean_pass_s(plan, plan.drafting, perf, shape)


def _decode_s(plan: FleetPlan, pool: PoolPlan, perf: PerfModel, num_keys: int) -> float:
    """Of one token in the mean, in a pass of as many sequences as fit, with as many drafts of each as fit then."""
    num_sequences = max(1, min(pool.max_running, pool.kv_tokens // num_keys))
    num_fitting = max(0, pool.saturation_tokens // num_sequences - 1)
    drafting = replace(plan.drafting, num_drafts=min(plan.drafting.num_drafts, num_fitting))
    num_tokens = num_sequences * drafting.num_tried
    shape = PassShape(num_decode_tokens=num_tokens, num_decode_keys=num_tokens * num_keys)
    return _mean_pass_s(plan, drafting, perf, shape) / (num_sequences * drafting.tokens_per_pass)


def _mean_pass_s(plan: FleetPlan, drafting: Drafting, perf: PerfModel, shape: PassShape) -> float:
    return drafting.pass_s(perf, shape, num_layers=plan.layout.num_layers) * fmean(perf.deviations or (1.0,))

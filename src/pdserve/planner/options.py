"""The fleets worth simulating: those whose pools the estimates call large enough, and some on either side."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from pdserve.config.role import Role
from pdserve.errors import ConfigError
from pdserve.perfmodel.placement import Placement
from pdserve.planner.candidate import Candidate, Pool
from pdserve.planner.estimate import Estimator
from pdserve.planner.goal import Goal

CHUNK_TOKENS = (512, 2048, 8192)
KEPT_PER_ROLE = 2
"""Shardings of a role that are tried, those with the fewest accelerators first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Fleets that differ in the number of workers of one pool: `[least, most]` of them, around the estimate."""

    fixed: tuple[Pool, ...]
    varied: Pool

    @property
    def least(self) -> int:
        return max(1, self.varied.num_workers // 2)

    @property
    def most(self) -> int:
        return self.varied.num_workers + max(2, math.ceil(self.varied.num_workers / 2))

    @property
    def is_colocated(self) -> bool:
        return not self.fixed

    def most_within(self, num_accelerators: int) -> int:
        """Workers of the varied pool, so that all have at most so many accelerators."""
        left = num_accelerators - sum(pool.num_accelerators for pool in self.fixed)
        return min(self.most, left // self.varied.placement.num_accelerators)

    def member(self, num_workers: int) -> Candidate:
        return Candidate(pools=(*self.fixed, replace(self.varied, num_workers=num_workers)))


def families(goal: Goal) -> tuple[Family, ...]:
    """Raises: `ConfigError` when the targets can't be met even by an idle fleet, or within the goal's accelerators."""
    estimators = [Estimator(goal=goal, placement=each, model=goal.model(each)) for each in goal.placements()]
    _require_possible(goal, estimators)
    prefill = _fewest(_prefill_pools(goal, estimators))
    decode = _fewest(_decode_pools(goal, estimators))
    found = [
        *(
            Family(fixed=(replace(left, num_workers=left.num_workers + more),), varied=right)
            for left, right, more in product(prefill, decode, (0, -1, 1))
            if left.num_workers + more > 0
        ),
        *(Family(fixed=(), varied=pool) for pool in _fewest(_colocated_pools(goal, estimators))),
    ]
    allowed = tuple(each for each in found if each.most_within(goal.max_accelerators) >= each.least)
    if not allowed:
        raise ConfigError(
            f"no fleet of up to {goal.max_accelerators} {goal.hardware.name} keeps up with "
            f"{goal.workload.rate_per_s:g} requests/s; plan for a lower rate or raise --max-gpus"
        )
    return allowed


def chunk_sizes(goal: Goal) -> tuple[int, ...]:
    """Those that cut a prompt differently."""
    whole = max(1, goal.workload.prompt_lengths[-1] - goal.workload.num_prefix_tokens)
    return tuple(size for size, smaller in zip(CHUNK_TOKENS, (0, *CHUNK_TOKENS), strict=False) if smaller < whole)


def _require_possible(goal: Goal, estimators: Iterable[Estimator]) -> None:
    """What an idle fleet can't do, no number of workers does."""
    chunk_tokens = chunk_sizes(goal)[-1]
    ttft_s = min(each.idle_ttft_s(chunk_tokens) for each in estimators)
    tpot_s = min(each.token_s(1) for each in estimators)
    reached = f"of {goal.shape.name} on a node of {goal.hardware.name}; ask for more"
    if ttft_s > goal.ttft_s:
        raise ConfigError(f"--slo ttft={goal.ttft_s:g} is below the {ttft_s:.3g} s of an idle fleet {reached}")
    if tpot_s > goal.tpot_s:
        raise ConfigError(f"--slo tpot={goal.tpot_s:g} is below the {tpot_s:.3g} s of an idle fleet {reached}")


def _prefill_pools(goal: Goal, estimators: Iterable[Estimator]) -> list[Pool]:
    """A prefill worker has no data-parallel ranks."""
    pools: list[Pool] = []
    for each, chunk_tokens in product(estimators, chunk_sizes(goal)):
        if each.placement.data_parallel_size > 1 or each.idle_ttft_s(chunk_tokens) > goal.ttft_s:
            continue
        num_workers = max(1, math.ceil(goal.workload.rate_per_s * each.prefill_s(chunk_tokens)))
        while (
            each.prefill_ttft_s(goal.workload.rate_per_s, num_workers=num_workers, chunk_tokens=chunk_tokens)
            > goal.ttft_s
        ):
            num_workers += 1
        pools.append(_pool(Role.PREFILL, each.placement, num_workers, chunk_tokens))
    return pools


def _decode_pools(goal: Goal, estimators: Iterable[Estimator]) -> list[Pool]:
    rates = [(each.placement, each.decode_rate()) for each in estimators]
    chunk_tokens = CHUNK_TOKENS[0] * goal.drafting.num_tried
    return [
        _pool(Role.DECODE, placement, _num_workers(goal, placement, rate), chunk_tokens)
        for placement, rate in rates
        if rate > 0
    ]


def _colocated_pools(goal: Goal, estimators: Iterable[Estimator]) -> list[Pool]:
    rates = [
        (each.placement, chunk_tokens, each.colocated_rate(chunk_tokens))
        for each, chunk_tokens in product(estimators, chunk_sizes(goal))
    ]
    return [
        _pool(Role.BOTH, placement, _num_workers(goal, placement, rate), chunk_tokens)
        for placement, chunk_tokens, rate in rates
        if rate > 0
    ]


def _num_workers(goal: Goal, placement: Placement, rank_rate: float) -> int:
    return max(1, math.ceil(goal.workload.rate_per_s / (rank_rate * placement.data_parallel_size)))


def _pool(role: Role, placement: Placement, num_workers: int, chunk_tokens: int) -> Pool:
    return Pool(role=role, placement=placement, num_workers=num_workers, chunk_tokens=chunk_tokens)


def _fewest(pools: Sequence[Pool]) -> list[Pool]:
    """One of each sharding: with the fewest workers, and of those that with the largest chunks."""
    ordered = sorted(pools, key=lambda pool: (pool.num_accelerators, -pool.chunk_tokens))
    best = {pool.placement: pool for pool in reversed(ordered)}
    return sorted(best.values(), key=lambda pool: pool.num_accelerators)[:KEPT_PER_ROLE]

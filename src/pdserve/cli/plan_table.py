"""A plan as text for people: what to run, why, and what the numbers rest on."""

from typing import TYPE_CHECKING

from pdserve.config.role import Role

if TYPE_CHECKING:
    from pdserve.perfmodel.placement import Placement
    from pdserve.planner.goal import Goal
    from pdserve.planner.search import Plan, Verdict

MS_PER_S = 1000
ROLE_NAMES = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "colocated"}
_HEAD = (
    f"{'fleet':<64} {'GPUs':>5} {'within SLO':>10} {'TTFT p50':>9} {'p90':>7} {'TPOT p50':>9} {'p90':>8} "
    f"{'req/s/GPU':>10}"
)


def format_plan(plan: "Plan", *, gpu_hour_cost: float | None) -> str:
    verdicts = [each for each in (plan.disaggregated, plan.colocated) if each is not None]
    placements = {pool.placement for each in verdicts for pool in each.candidate.pools}
    return "\n".join(
        [
            _conclusion(plan),
            "",
            _HEAD + (f" {'per M tokens':>13}" if gpu_hour_cost is not None else ""),
            *(_line(plan, each, gpu_hour_cost) for each in verdicts),
            "",
            *(f"- {reason}" for reason in _reasons(plan)),
            "",
            *sorted(_provenance(plan.goal, placement) for placement in placements),
        ]
    )


def _conclusion(plan: "Plan") -> str:
    goal, best = plan.goal, plan.best
    load = f"{goal.workload}, TTFT {goal.ttft_s:g} s, TPOT {MS_PER_S * goal.tpot_s:g} ms"
    if best.meets(goal):
        return f"plan: {best.candidate}, {best.candidate.num_accelerators} {goal.hardware.name}, for {load}"
    return (
        f"no plan: {best.attainment:.0%} of requests are within the SLO in what comes closest, {best.candidate}, for "
        f"{load}"
    )


def _provenance(goal: "Goal", placement: "Placement") -> str:
    from pdserve.perfmodel.known import stored_profile

    line = f"times of {placement}: {goal.model(placement).provenance}"
    profile = stored_profile(placement, tables=goal.tables)
    if profile is None or profile.accuracy.mixed_mape is not None:
        return line
    return f"{line}; passes of a prompt's chunk with decode tokens are not tabulated, they follow from the model's form"


def _line(plan: "Plan", verdict: "Verdict", gpu_hour_cost: float | None) -> str:
    goal = plan.goal
    line = (
        f"{verdict.candidate!s:<64} {verdict.candidate.num_accelerators:>5} {verdict.attainment:>10.1%} "
        f"{verdict.ttft_s_p50:>7.2f} s {verdict.ttft_s_p90:>5.2f} s {MS_PER_S * verdict.tpot_s_p50:>6.1f} ms "
        f"{MS_PER_S * verdict.tpot_s_p90:>5.1f} ms {verdict.goodput_per_accelerator(goal):>10.4f}"
    )
    if gpu_hour_cost is None:
        return line
    return f"{line} {verdict.cost_per_million_tokens(goal, accelerator_hour_cost=gpu_hour_cost):>13.2f}"


def _reasons(plan: "Plan") -> list[str]:
    reasons = [_comparison(plan)]
    for verdict in (plan.disaggregated, plan.colocated):
        if verdict is not None:
            busy = ", ".join(f"{ROLE_NAMES[role]} {share:.0%}" for role, share in verdict.utilisation.items())
            reasons.append(f"{verdict.candidate}: busy {busy}; {ROLE_NAMES[verdict.busiest]} saturates first")
    if not plan.best.meets(plan.goal):
        reasons.append(_what_is_missed(plan))
    if plan.goal.drafting.num_drafts:
        reasons.append(f"decoding with {plan.goal.drafting}")
    reasons.append(f"{len(plan.simulated)} fleets were simulated, the smallest that meets the SLO kept of each kind")
    return reasons


def _comparison(plan: "Plan") -> str:
    goal, apart, together = plan.goal, plan.disaggregated, plan.colocated
    if apart is None or not apart.meets(goal):
        if together is None or not together.meets(goal):
            return "neither apart nor colocated is the SLO met"
        return "prefill and decode apart do not meet the SLO, colocated they do"
    if together is None or not together.meets(goal):
        return "colocated workers do not meet the SLO: prompts hold up the tokens of others"
    ratio = apart.goodput_per_accelerator(goal) / together.goodput_per_accelerator(goal)
    return f"goodput a GPU apart is {ratio:.2f} times that of colocated workers"


def _what_is_missed(plan: "Plan") -> str:
    goal, best = plan.goal, plan.best
    missed = [
        name
        for name, value, limit in (("TTFT", best.ttft_s_p90, goal.ttft_s), ("TPOT", best.tpot_s_p90, goal.tpot_s))
        if value > limit
    ]
    return f"what comes closest misses {' and '.join(missed) or 'the share'}; relax it, or allow more GPUs"

"""The simulated fleets of a plan drawn for people: how well each keeps the SLO, and what a GPU of it is worth."""

# matplotlib's own annotations are partly unknown.
# pyright: reportUnknownMemberType=false

from pathlib import Path

import matplotlib

from pdserve.planner.search import Plan, Verdict

matplotlib.use("Agg")

from matplotlib import pyplot as plt

COLORS = {False: "#4c72b0", True: "#dd8452"}


def draw_plan(plan: Plan, out: Path) -> None:
    """A PNG of 1,200 x 500 pixels."""
    goal = plan.goal
    figure, (shares, goodputs) = plt.subplots(1, 2, figsize=(12, 5), dpi=100)
    for is_colocated, color in COLORS.items():
        label = "colocated" if is_colocated else "prefill and decode apart"
        verdicts = sorted(
            (each for each in plan.simulated if each.candidate.is_colocated is is_colocated), key=_num_accelerators
        )
        gpus = [_num_accelerators(each) for each in verdicts]
        shares.plot(gpus, [100 * each.attainment for each in verdicts], "o", color=color, label=label)
        goodputs.plot(gpus, [each.goodput_per_accelerator(goal) for each in verdicts], "o", color=color, label=label)
    shares.axhline(100 * goal.attainment, color="gray", linestyle="--")
    shares.set_ylabel("% of requests within the SLO")
    goodputs.axvline(_num_accelerators(plan.best), color="gray", linestyle="--")
    goodputs.set_ylabel("requests/s within the SLO, a GPU")
    for axes in (shares, goodputs):
        axes.set_xlabel(f"{goal.hardware.name} of the fleet")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle(f"{goal.shape.name}, {goal.workload.rate_per_s:g} requests/s: {plan.best.candidate}")
    figure.tight_layout()
    figure.savefig(out)
    plt.close(figure)


def _num_accelerators(verdict: Verdict) -> int:
    return verdict.candidate.num_accelerators

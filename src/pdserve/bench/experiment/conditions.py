"""What a run met on the machine, and whether it counts."""

from collections.abc import Sequence

import msgspec

from pdserve.bench.experiment.cpu_time import CpuShares

MAX_DISTURBANCE = 0.10
"""Of the machine's CPU time, stolen by the hypervisor or used by processes that are not the experiment's."""

MAX_GEMM_DEVIATION = 0.10
"""Of the calibration product's time from its reference: another clock speed, or a busy sibling core, would show."""


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the run's wall clock times the number of cores, if not said otherwise."""

    steal_share: float
    foreign_share: float
    """CPU time of all processes but those of the experiment."""
    own_share: float
    psi_cpu_share: float | None
    """Of the wall clock, in which some task waited for a core; None where the kernel does not tell. Recorded, not
    judged: the experiment's own processes share cores (gateway and worker), so it is high on a quiet machine too."""
    gemms_s: tuple[tuple[float, ...], ...]
    """The calibration product's times, before the run and after it; each by core."""

    @classmethod
    def of(cls, used: CpuShares, *, gemms_s: tuple[tuple[float, ...], ...]) -> "Conditions":
        return cls(
            steal_share=used.steal,
            foreign_share=used.foreign,
            own_share=used.own,
            psi_cpu_share=used.psi,
            gemms_s=gemms_s,
        )


def void_reason(conditions: Conditions, *, reference_s: Sequence[float]) -> str | None:
    """Why the run does not count; None when it does. `reference_s`: of the calibration product, by core.

    Before the run or after it is enough: a core that was slow both times was slow all the while, one that was slow at
    one of them was so for some seconds, as cores of a shared host are now and then in every run.
    """
    disturbance = conditions.steal_share + conditions.foreign_share
    if disturbance > MAX_DISTURBANCE:
        return (
            f"{100 * conditions.steal_share:.0f}% of CPU time stolen and {100 * conditions.foreign_share:.0f}% used by "
            f"others, together over {100 * MAX_DISTURBANCE:.0f}%"
        )
    fastest_s = map(min, zip(*conditions.gemms_s, strict=True))
    ratios = [seconds / usual_s for seconds, usual_s in zip(fastest_s, reference_s, strict=True)]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    if abs(worst - 1) > MAX_GEMM_DEVIATION:
        return f"the calibration product took {worst:.2f} of its reference, over {100 * MAX_GEMM_DEVIATION:.0f}% off"
    return None

"""What became of the requests of a fleet."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.config.role import Role

ANSWERED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """Arrays by request, in the order of arrival; NaN where a request has no such figure."""

    arrival_s: NDArray[np.float64]
    num_prompt_tokens: NDArray[np.int32]
    num_output_tokens: NDArray[np.int32]
    """Delivered."""
    status: NDArray[np.int16]
    """`ANSWERED`, or the HTTP status that the client got instead."""
    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    worst_gap_s: NDArray[np.float64]
    e2e_s: NDArray[np.float64]
    exposed_s: NDArray[np.float64]
    """From the end of its prefill to the landing of its KV; NaN where it was prefilled on the decode worker."""
    utilisation: dict[Role, float]
    """Of each pool, the share of the time until the last arrival that its ranks computed in."""
    span_s: float
    """From the first arrival to the last ending."""

    @property
    def num_requests(self) -> int:
        return len(self.status)

    @property
    def is_answered(self) -> NDArray[np.bool_]:
        return self.status == ANSWERED

    @property
    def num_refused(self) -> int:
        """Requests that got an error, whichever."""
        return int(self.num_requests - np.count_nonzero(self.is_answered))

    @property
    def output_tokens_per_s(self) -> float:
        return float(self.num_output_tokens.sum()) / self.span_s if self.span_s > 0 else 0.0

    def attainment(self, *, ttft_s: float, tpot_s: float, worst_gap_s: float = float("inf")) -> float:
        """The share of the requests that kept within all limits; one that was refused did not."""
        met = self.is_answered & (self.ttft_s <= ttft_s)
        for values, limit in ((self.tpot_s, tpot_s), (self.worst_gap_s, worst_gap_s)):
            met &= np.isnan(values) | (values <= limit)
        return float(met.mean()) if self.num_requests else 1.0

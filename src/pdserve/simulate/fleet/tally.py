"""What clients see, request by request: a few numbers each, in flat arrays."""

from array import array

import numpy as np

from pdserve.config.role import Role
from pdserve.errors import InternalError
from pdserve.simulate.fleet.result import ANSWERED, FleetResult
from pdserve.units import NS_PER_S
from pdserve.workload.request import WorkloadRequest

PENDING = -1
NEVER_NS = -1


class Tally:
    """By request, in the order of arrival. Units: ns of the virtual clock.

    Cost: some 60 bytes a request.
    """

    def __init__(self) -> None:
        self._arrival_ns = array("q")
        self._first_ns = array("q")
        self._last_ns = array("q")
        self._worst_gap_ns = array("q")
        self._exposed_ns = array("q")
        self._num_prompt_tokens = array("i")
        self._num_tokens = array("i")
        self._status = array("h")
        self.num_open = 0

    @property
    def num_ended(self) -> int:
        return len(self._status) - self.num_open

    def arrive(self, request: WorkloadRequest, *, now_ns: int) -> int:
        """The index of a new request."""
        self._arrival_ns.append(now_ns)
        for instants in (self._first_ns, self._last_ns, self._exposed_ns):
            instants.append(NEVER_NS)
        self._worst_gap_ns.append(0)
        self._num_prompt_tokens.append(request.num_prompt_tokens)
        self._num_tokens.append(0)
        self._status.append(PENDING)
        self.num_open += 1
        return len(self._status) - 1

    def deliver(self, index: int, num_tokens: int, *, is_last: bool, now_ns: int) -> None:
        last_ns = self._last_ns[index]
        if last_ns == NEVER_NS:
            self._first_ns[index] = now_ns
        elif now_ns - last_ns > self._worst_gap_ns[index]:
            self._worst_gap_ns[index] = now_ns - last_ns
        self._last_ns[index] = now_ns
        self._num_tokens[index] += num_tokens
        if is_last:
            self._end(index, ANSWERED)

    def fail(self, index: int, status: int) -> None:
        self._end(index, status)

    def expose(self, index: int, duration_ns: int) -> None:
        """Of the last handoff of a request, the part that its prefill did not hide."""
        self._exposed_ns[index] = max(0, duration_ns)

    def result(self, *, utilisation: dict[Role, float], span_ns: int) -> FleetResult:
        """Of the requests that have ended."""
        has_ended = np.frombuffer(self._status, np.int16) != PENDING
        status = np.frombuffer(self._status, np.int16)[has_ended]
        is_answered = status == ANSWERED
        arrival_s, first_s, last_s = (
            np.frombuffer(instants, np.int64)[has_ended] / NS_PER_S
            for instants in (self._arrival_ns, self._first_ns, self._last_ns)
        )
        num_tokens = np.frombuffer(self._num_tokens, np.int32)[has_ended]
        num_gaps = np.where(num_tokens > 1, num_tokens - 1, 1)
        exposed_ns = np.frombuffer(self._exposed_ns, np.int64)[has_ended]
        worst_gap_ns = np.frombuffer(self._worst_gap_ns, np.int64)[has_ended]
        has_gaps = is_answered & (num_tokens > 1)
        return FleetResult(
            arrival_s=arrival_s,
            num_prompt_tokens=np.frombuffer(self._num_prompt_tokens, np.int32)[has_ended],
            num_output_tokens=num_tokens,
            status=status,
            ttft_s=np.where(is_answered, first_s - arrival_s, np.nan),
            tpot_s=np.where(has_gaps, (last_s - first_s) / num_gaps, np.nan),
            worst_gap_s=np.where(has_gaps, worst_gap_ns / NS_PER_S, np.nan),
            e2e_s=np.where(is_answered, last_s - arrival_s, np.nan),
            exposed_s=np.where(exposed_ns >= 0, exposed_ns / NS_PER_S, np.nan),
            utilisation=utilisation,
            span_s=span_ns / NS_PER_S,
        )

    def _end(self, index: int, status: int) -> None:
        if self._status[index] != PENDING:
            raise InternalError(f"request {index} ended twice: {self._status[index]}, then {status}")
        self._status[index] = status
        self.num_open -= 1

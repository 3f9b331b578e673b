"""The search with fleets simulated in several processes at a time, which finds what it would find in one.

What the search asks for next depends on verdicts that are still out. So it is run again and again over the verdicts
that are in, for either kind of fleets: what it asks for first is needed for certain, and what it would ask for after
either verdict on that is simulated too, as long as a process has nothing else to do.
"""

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from pdserve.errors import InternalError
from pdserve.planner.candidate import Candidate
from pdserve.planner.goal import Goal
from pdserve.planner.options import Family
from pdserve.planner.search import Plan, Simulate, Verdict, kinds, search, search_kind, simulated

Verdicts = Mapping[Candidate, Verdict]


def search_in_parallel(
    goal: Goal, *, num_processes: int, on_run: Callable[[str], None], simulate: Simulate = simulated
) -> Plan:
    """`search`, line by line in the same order. However it ends, no process that it started is left.

    Raises: as `search`.
    """
    if num_processes == 1:
        return search(goal, simulate, on_run=on_run)
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(num_processes, initializer=_leave_interrupts_to_parent)
    try:
        return _Search(goal, simulate, executor, num_processes, on_run).run()
    except BrokenProcessPool as error:
        raise InternalError("a process that simulated was killed, for its memory perhaps; give fewer --jobs") from error
    finally:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        executor.shutdown(cancel_futures=True)


class _Search:
    def __init__(
        self,
        goal: Goal,
        simulate: Simulate,
        executor: ProcessPoolExecutor,
        num_processes: int,
        on_run: Callable[[str], None],
    ) -> None:
        self._goal = goal
        self._simulate = simulate
        self._executor = executor
        self._num_processes = num_processes
        self._on_run = on_run
        self._num_said = 0
        self._kinds = kinds(goal)
        self._known: dict[Candidate, Verdict] = {}
        self._running: dict[Future[Verdict], Candidate] = {}

    def run(self) -> Plan:
        while True:
            plan = self._replay()
            if plan is not None:
                return plan
            self._start()
            done, _ = wait(self._running, return_when=FIRST_COMPLETED)
            for future in done:
                self._known[self._running.pop(future)] = future.result()

    def _replay(self) -> Plan | None:
        """The search as far as verdicts are known, with its lines up to there."""
        lines: list[str] = []
        try:
            return search(self._goal, lambda _, candidate: _look_up(self._known, candidate), on_run=lines.append)
        except _Unknown:
            return None
        finally:
            for line in lines[self._num_said :]:
                self._on_run(line)
            self._num_said = len(lines)

    def _start(self) -> None:
        running = set(self._running.values())
        wanted = next_candidates(self._goal, self._kinds, self._known, num_most=self._num_processes)
        for candidate in wanted:
            if len(self._running) < self._num_processes and candidate not in running:
                self._running[self._executor.submit(self._simulate, self._goal, candidate)] = candidate


def next_candidates(
    goal: Goal, of_kinds: Sequence[Sequence[Family]], known: Verdicts, *, num_most: int
) -> list[Candidate]:
    """What the search asks for next in each kind, then what it may ask for after that, each once."""
    wanted: dict[Candidate, None] = {}
    suppositions: deque[tuple[Sequence[Family], Verdicts]] = deque((kind, known) for kind in of_kinds)
    while suppositions and len(wanted) < num_most:
        kind, supposed = suppositions.popleft()
        try:
            search_kind(goal, kind, lambda candidate, supposed=supposed: _look_up(supposed, candidate))
        except _Unknown as unknown:
            wanted[unknown.candidate] = None
            for attainment in (1.0, 0.0):
                verdict = _supposed(unknown.candidate, attainment)
                suppositions.append((kind, {**supposed, unknown.candidate: verdict}))
    return list(wanted)


class _Unknown(Exception):
    def __init__(self, candidate: Candidate) -> None:
        super().__init__(str(candidate))
        self.candidate = candidate


def _look_up(known: Verdicts, candidate: Candidate) -> Verdict:
    if candidate not in known:
        raise _Unknown(candidate)
    return known[candidate]


def _supposed(candidate: Candidate, attainment: float) -> Verdict:
    nothing = float("nan")
    return Verdict(
        candidate=candidate,
        attainment=attainment,
        ttft_s_p50=nothing,
        ttft_s_p90=nothing,
        tpot_s_p50=nothing,
        tpot_s_p90=nothing,
        utilisation=dict.fromkeys((pool.role for pool in candidate.pools), 0.0),
    )


def _leave_interrupts_to_parent() -> None:
    """Ctrl-C goes to all processes of a terminal; the one that started them ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

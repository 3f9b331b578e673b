"""What is to be said of one case: nothing, or what was wrong, hung, leaked, or not brought about."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from pdserve.bench.faults.asking import Answer, Ending
from pdserve.bench.faults.cases import Promise

LOST_CODES = frozenset({"worker_lost", "503 worker_lost", "503 no_worker"})
"""Of a stream's last event, or with the status of a response."""


class Flaw(Enum):
    WRONG = "wrong"
    """Other tokens, a truncated answer, or an error that was not promised."""
    HUNG = "hung"
    """Something had not ended, or was not back, when its time was over."""
    LEAKED = "leaked"
    """A ledger was not empty when everything was idle."""
    UNFORCED = "unforced"
    """The moment did not come, so the case shows nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    flaw: Flaw
    what: str


@dataclass(slots=True, kw_only=True)
class Result:
    """Of one case."""

    name: str
    elapsed_s: float = 0.0
    findings: list[Finding] = field(default_factory=list[Finding])

    def add(self, flaw: Flaw, what: str) -> None:
        self.findings.append(Finding(flaw=flaw, what=what))

    def judge(self, who: str, answer: Answer, expected: tuple[int, ...], promise: Promise) -> None:
        flaw = flaw_of(answer, expected, promise)
        if flaw is not None:
            self.add(flaw, f"{who}: {answer}, promised was {promise.value}")

    def has(self, flaw: Flaw) -> bool:
        return any(finding.flaw is flaw for finding in self.findings)


def flaw_of(answer: Answer, expected: tuple[int, ...], promise: Promise) -> Flaw | None:
    """None when the answer keeps the promise."""
    if answer.token_ids != expected[: len(answer.token_ids)]:
        return Flaw.WRONG
    match answer.ending:
        case Ending.FINISHED:
            keeps = answer.token_ids == expected
        case Ending.ERROR:
            keeps = promise is Promise.SAME_OR_LOST and answer.code in LOST_CODES
        case Ending.BROKEN:
            keeps = promise is Promise.SAME_OR_BROKEN
        case Ending.LEFT:
            keeps = True
        case Ending.TRUNCATED:
            keeps = False
        case Ending.HUNG:
            return Flaw.HUNG
    return None if keeps else Flaw.WRONG


def is_flawless(results: Sequence[Result]) -> bool:
    """Whether there were cases, and nothing is to be said of any."""
    return bool(results) and not any(result.findings for result in results)


def last_line(results: Sequence[Result]) -> str:
    """What the command ends with."""
    counts = {flaw: sum(result.has(flaw) for result in results) for flaw in Flaw}
    unforced = f" unforced={counts[Flaw.UNFORCED]}" if counts[Flaw.UNFORCED] else ""
    return (
        f"verify-faults: {'ok' if is_flawless(results) else 'FAILED'} cases={len(results)} wrong={counts[Flaw.WRONG]} "
        f"hung={counts[Flaw.HUNG]} leaked={counts[Flaw.LEAKED]}{unforced}"
    )

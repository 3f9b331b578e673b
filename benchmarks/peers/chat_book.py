"""What the arms came to, run by run: the contents of the result's file, and the table."""

import itertools
import statistics
from collections.abc import Callable, Sequence

import msgspec
from chat_arms import Arm
from chat_load import Exchange, Kind, Load

from pdserve.bench.load.result import Distribution
from pdserve.bench.load.summary import distribution
from pdserve.bench.provenance import Machine

MAX_ITL_P99_S = 0.09
MAX_CHAT_TTFT_P50_S = 0.5
MIN_TOKENS_PER_S = 35.0
"""The aims, all at once, of one prefill and one decode worker."""

MAX_DISTURBANCE = 0.10
"""Of the machine, by other processes and the hypervisor; a run with more is marked."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What clients saw in one run; times in seconds."""

    itl: Distribution | None
    """Gaps between tokens of all answers, the long prompts' too, that began in the load's duration."""
    chat_ttft: Distribution | None
    long_ttft: Distribution | None
    tokens_per_s: float
    """Of all answers, in the load's duration."""
    num_chats: int
    num_longs: int
    num_failed: int
    first_error: str | None

    @property
    def meets_aims(self) -> bool:
        return (
            self.itl is not None
            and self.itl.p99 <= MAX_ITL_P99_S
            and self.chat_ttft is not None
            and self.chat_ttft.p50 <= MAX_CHAT_TTFT_P50_S
            and self.tokens_per_s >= MIN_TOKENS_PER_S
            and not self.num_failed
        )


class ArmRun(msgspec.Struct, frozen=True, kw_only=True):
    arm: Arm
    repetition: int
    started: str
    commit: str | None
    figures: Figures
    own_share: float
    """Of the CPU time of all cores, as the two after it."""
    foreign_share: float
    steal_share: float
    client_cpu_s: float

    @property
    def is_disturbed(self) -> bool:
        return self.foreign_share + self.steal_share > MAX_DISTURBANCE


class NotRun(msgspec.Struct, frozen=True, kw_only=True):
    arm: Arm
    repetition: int
    reason: str


class Book(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    cpus: tuple[int, int]
    model: str
    configuration: dict[str, str]
    load: Load
    runs: tuple[ArmRun, ...] = ()
    not_run: tuple[NotRun, ...] = ()


def figures(exchanges: Sequence[Exchange], *, seconds: float) -> Figures:
    """Tokens after the load's duration, while the last answers end, count in no speed. First tokens count whenever they
    came, and gaps that began before its end: who waits longest must not be left out."""

    def ttft(kind: Kind) -> Distribution | None:
        return distribution(each.token_s[0] - each.sent_s for each in exchanges if each.kind is kind and each.token_s)

    gaps = (
        after - before for each in exchanges for before, after in itertools.pairwise(each.token_s) if before <= seconds
    )
    num_tokens = sum(instant <= seconds for each in exchanges for instant in each.token_s)
    errors = [each.error for each in exchanges if each.error is not None]
    return Figures(
        itl=distribution(gaps),
        chat_ttft=ttft(Kind.CHAT),
        long_ttft=ttft(Kind.LONG),
        tokens_per_s=num_tokens / seconds,
        num_chats=sum(each.kind is Kind.CHAT for each in exchanges),
        num_longs=sum(each.kind is Kind.LONG for each in exchanges),
        num_failed=len(errors),
        first_error=errors[0] if errors else None,
    )


COLUMNS: dict[str, Callable[[Figures], float | None]] = {
    "ITL p50": lambda found: found.itl and found.itl.p50,
    "ITL p99": lambda found: found.itl and found.itl.p99,
    "ITL max": lambda found: found.itl and found.itl.max,
    "chat TTFT p50": lambda found: found.chat_ttft and found.chat_ttft.p50,
    "chat TTFT p99": lambda found: found.chat_ttft and found.chat_ttft.p99,
    "long TTFT p50": lambda found: found.long_ttft and found.long_ttft.p50,
    "tokens/s": lambda found: found.tokens_per_s,
}
WIDTH = 21


def table(book: Book) -> str:
    """Medians over the repetitions, with the least and the greatest; then the aims, and what did not run."""
    lines = [f"{'arm':<20}" + "".join(f"{name:>{WIDTH}}" for name in COLUMNS)]
    for arm in Arm:
        if runs := [run for run in book.runs if run.arm is arm]:
            lines.append(f"{arm.value:<20}" + "".join(f"{cell(runs, of):>{WIDTH}}" for of in COLUMNS.values()))
    lines.append("medians of the repetitions (least-greatest); times in seconds")
    lines += [aims_line(run) for run in book.runs if run.arm is Arm.PDSERVE_APART]
    lines += [
        f"{name_of(run)}: {run.figures.num_failed} failed, such as: {run.figures.first_error}"
        for run in book.runs
        if run.figures.num_failed
    ]
    lines += [
        f"{name_of(run)}: disturbed: others had {run.foreign_share:.0%} of the cores, {run.steal_share:.0%} was stolen"
        for run in book.runs
        if run.is_disturbed
    ]
    lines += [f"{name_of(one)}: not run: {one.reason}" for one in book.not_run]
    commits = sorted({run.commit or "unknown" for run in book.runs})
    lines.append(f"{book.machine.cpu}, cores {book.cpus[0]} and {book.cpus[1]}, float32, commit {', '.join(commits)}")
    return "\n".join(lines)


def aims_line(run: ArmRun) -> str:
    return (
        f"{name_of(run)}: aims ITL p99 <= {MAX_ITL_P99_S:g} s, chat TTFT p50 <= {MAX_CHAT_TTFT_P50_S:g} s, "
        f">= {MIN_TOKENS_PER_S:g} tokens/s, all at once: {'met' if run.figures.meets_aims else 'missed'}"
    )


def cell(runs: Sequence[ArmRun], of: Callable[[Figures], float | None]) -> str:
    values = [value for run in runs if (value := of(run.figures)) is not None]
    if not values:
        return "-"
    places = 1 if min(values) >= 10 else 3
    return f"{statistics.median(values):.{places}f} ({min(values):.{places}f}-{max(values):.{places}f})"


def name_of(run: ArmRun | NotRun) -> str:
    return f"{run.arm.value}, repetition {run.repetition}"

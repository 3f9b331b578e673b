"""Clients: what each asks and was told, held against what the model answers."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.gateway.dispatcher import Work
from pdserve.gateway.failures import Failure
from pdserve.kv.layout import KvLayout
from pdserve.simulate.model import reference_answer
from pdserve.simulate.referee import RuleBroken
from pdserve.wire.cluster import Delta, PrefillPlace

TIMED_OUT_STATUS = 504
TEMPORARY_STATUSES = (429, 503)
"""Such an answer says when to come back (H6)."""

HONEST_STATUSES = (*TEMPORARY_STATUSES, TIMED_OUT_STATUS)
"""What a client may be told of a request that was right: full, lost, too late (H9)."""


@dataclass(slots=True)
class Client:
    work: Work
    layout: KvLayout
    """Of the model that answers it."""
    answers: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Tokens so far, by choice."""
    finished: set[int] = field(default_factory=set[int])
    endings: list[str] = field(default_factory=list[str])
    depends_on: set[str] = field(default_factory=set[str])
    """Workers that it was sent to, or that were to prefill it."""
    has_asked: bool = False
    place: PrefillPlace | None = None
    """Where its prompt was computed, as its answer says."""
    on_refused: Callable[[float], None] | None = None
    """Told after how many seconds to come back; None: this client does not."""

    @property
    def name(self) -> str:
        return self.work.request_id

    @property
    def wanted(self) -> tuple[int, ...]:
        return reference_answer(self.layout, self.work.prompt_token_ids, self.work.sampling.max_tokens)

    def hear(self, delta: Delta) -> None:
        """H8: no token but the model's. H9: nothing after the end."""
        self.place = delta.prefill or self.place
        answer = self.answers.setdefault(delta.choice_index, [])
        answer += delta.token_ids
        if tuple(answer) != self.wanted[: len(answer)]:
            raise RuleBroken(f"H8: {self.name} is answered {answer}, not {list(self.wanted)}", about=self.name)
        if self.endings or delta.choice_index in self.finished:
            raise RuleBroken(f"H7: {self.name} hears more after its end {self.endings}", about=self.name)
        if delta.finish_reason is not None:
            if len(answer) != len(self.wanted):
                raise RuleBroken(f"H8: {self.name} finished with {answer}, not {list(self.wanted)}", about=self.name)
            self.finished.add(delta.choice_index)
        if len(self.finished) == self.work.num_choices:
            self.end("answered")

    def fail(self, failure: Failure, *, now_ns: int) -> None:
        """H9: the statuses that a right request may get, and 504 only when its time is over."""
        status = failure.status
        if status not in HONEST_STATUSES or (status == TIMED_OUT_STATUS and now_ns < self.work.deadline_ns):
            raise RuleBroken(f"H9: {self.name} is told {status}", about=self.name)
        self.end(f"refused {status}")
        if status in TEMPORARY_STATUSES:
            if failure.retry_after_s is None:
                raise RuleBroken(f"H6: {self.name} is told {status}, but not when to come back", about=self.name)
            if self.on_refused is not None:
                self.on_refused(failure.retry_after_s)

    def lose(self) -> None:
        """The gateway died, or is not there: the connection ends, and that is the request's one ending."""
        if not self.endings:
            self.end("broken off")

    @property
    def was_lost(self) -> bool:
        """It was on some worker, and was told that there is none to answer it."""
        return bool(self.depends_on) and "refused 503" in self.endings

    def end(self, how: str) -> None:
        self.endings.append(how)
        if len(self.endings) > 1:
            raise RuleBroken(f"H7: {self.name} ended {self.endings}", about=self.name)

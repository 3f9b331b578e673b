"""One sequence: its tokens, how many of them have their KV, and the pages that hold it."""

from dataclasses import dataclass, field

from pdserve.ids import PageIndex, SequenceId
from pdserve.sampling import SamplingParams


@dataclass(slots=True, kw_only=True)
class Sequence:
    """Owned by the scheduler between `add` and the moment it is given back (`remove`, `StepOutcome`).

    `token_ids[0:num_prompt_tokens]` is the prompt, the rest was generated.
    Pages cover at least `[0, num_computed)`; whoever holds the sequence owns its pages.
    """

    sequence_id: SequenceId
    token_ids: list[int]
    num_prompt_tokens: int
    arrival_ns: int
    sampling: SamplingParams | None
    """None: a prefill-only sequence, computed up to its last token but without it, and never sampled."""
    num_computed: int = 0
    page_indices: list[PageIndex] = field(default_factory=list[PageIndex])
    tail_slot: int | None = None
    """Prefill-only: where the engine puts the hidden state of the last computed position."""
    carry_slot: int | None = None
    """Handed over: where the hidden state of the last computed position is. None from the first pass on."""
    draft_token_ids: tuple[int, ...] = ()
    """Guesses of what comes after `token_ids`, to be tried in the next pass."""
    scheduled_ns: int | None = None
    """When its first chunk was put into a batch; set by the scheduler, kept over preemptions."""

    @property
    def generates(self) -> bool:
        return self.sampling is not None

    @property
    def decodes(self) -> bool:
        """True when the next token follows from one token: all before it have their KV."""
        return self.sampling is not None and len(self.token_ids) - self.num_computed == 1

    @property
    def compute_stop(self) -> int:
        """Tokens `[num_computed, compute_stop)` are to be computed now."""
        return len(self.token_ids) - (self.sampling is None)

    @property
    def longest_stop(self) -> int:
        """Tokens `[0, longest_stop)` are computed in the end, if none ends the answer early: all but the last."""
        return self.compute_stop if self.sampling is None else self.num_prompt_tokens + self.sampling.max_tokens - 1

    @property
    def seniority(self) -> tuple[int, SequenceId]:
        """Ascending from the oldest."""
        return self.arrival_ns, self.sequence_id

    @property
    def num_uncomputed(self) -> int:
        return self.compute_stop - self.num_computed

"""What one finished pass meant for the sequences in it."""

from dataclasses import dataclass, field

from pdserve.ids import SequenceId
from pdserve.sampling import TokenLogprobs
from pdserve.schedule.sequence import Sequence


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    sampled: list[tuple[Sequence, int]] = field(default_factory=list[tuple[Sequence, int]])
    """Each sequence that got a token, which is in its `token_ids` already. It stays in the scheduler."""
    logprobs: dict[SequenceId, TokenLogprobs] = field(default_factory=dict[SequenceId, TokenLogprobs])
    """Of these tokens, where the sequence asks for them."""
    prefilled: list[Sequence] = field(default_factory=list[Sequence])
    """Prefill-only sequences that are computed. They left the scheduler; the caller owns their pages."""
    removed: list[Sequence] = field(default_factory=list[Sequence])
    """Sequences whose removal waited for the pass. They left the scheduler without the token sampled in this pass; the
    caller owns their pages."""

"""What one finished pass meant for the sequences in it."""

from dataclasses import dataclass, field

from pdserve.ids import SequenceId
from pdserve.sampling import TokenLogprobs
from pdserve.schedule.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    sequence: Sequence
    start: int
    """The prompt token of the first entry, at least 1."""
    entries: tuple[TokenLogprobs, ...]


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    sampled: list[tuple[Sequence, tuple[int, ...]]] = field(default_factory=list[tuple[Sequence, tuple[int, ...]]])
    """Each sequence that got tokens, which are in its `token_ids` already. It stays in the scheduler."""
    logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = field(
        default_factory=dict[SequenceId, tuple[TokenLogprobs, ...]]
    )
    """Of these tokens, where the sequence asks for them."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list[PromptLogprobs])
    """Of prompts computed in this pass; again for a sequence that was preempted."""
    num_drafts: int = 0
    num_drafts_accepted: int = 0
    """Of the drafts in this pass."""
    prefilled: list[Sequence] = field(default_factory=list[Sequence])
    """Prefill-only sequences that are computed. They left the scheduler; the caller owns their pages."""
    removed: list[Sequence] = field(default_factory=list[Sequence])
    """Sequences whose removal waited for the pass. They left the scheduler without the token sampled in this pass; the
    caller owns their pages."""

"""What the scheduler tells the executor to run, and what comes back. Encoded as msgpack between the two processes."""

import msgspec

from pdserve.ids import SequenceId
from pdserve.sampling import SamplingParams, TokenLogprobs


class Chunk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens `[start, start + len(token_ids))` of one sequence, to be computed in this pass."""

    sequence_id: SequenceId
    start: int
    """Tokens before it have their KV in the pages already."""
    token_ids: tuple[int, ...]
    page_indices: tuple[int, ...]
    """The pages of tokens `[0, stop)`, in order."""
    samples: bool
    """True when the chunk ends at the last known token of a generating sequence: one token is sampled after it."""
    tail_slot: int | None = None
    """Where the hidden state (after the final norm) of the chunk's last position goes; in its last chunk only."""

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


class NewSequence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sent once, before or with the first chunk that samples: what the sampler must know of a sequence."""

    sequence_id: SequenceId
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    """Tokens sampled earlier (after a preemption), so that penalties and seed position go on."""
    sampling: SamplingParams


class Batch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One forward pass."""

    pass_index: int
    """Counts passes from 0 without gaps; fixes the layer counter's values (see `pdserve.layer_counter`)."""
    chunks: tuple[Chunk, ...]
    new_sequences: tuple[NewSequence, ...] = ()
    ended_sequences: tuple[SequenceId, ...] = ()
    """The sampler may forget these."""


class BatchResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass_index: int
    sampled: tuple[tuple[SequenceId, int], ...]
    """One token for each chunk with `samples`, in the order of the chunks."""
    logprobs: tuple[tuple[SequenceId, TokenLogprobs], ...] = ()
    """Of the sampled tokens of the sequences that ask for them."""
    started_ns: int
    ended_ns: int

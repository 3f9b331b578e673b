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
    """The pages of tokens `[0, stop)`, in order, and perhaps of some after them: there an engine's drafter may look
    ahead."""
    samples: bool
    """True when the chunk reaches the last known token of a generating sequence: a token is sampled after it, and one
    more after each draft that is the token sampled in its place."""
    num_drafts: int = 0
    """So many of the last `token_ids` are guesses, which come after the last known token."""
    tail_slot: int | None = None
    """Where the hidden state (after the final norm) of the chunk's last position goes; in its last chunk only."""
    carry_slot: int | None = None
    """The tail slot that holds the hidden state of the token before `start`, in the first chunk after a handoff."""
    num_prompt_logprobs: int | None = None
    """Logprobs are wanted of the tokens `[start + 1, stop + 1)`, and of so many of the likeliest in their places."""
    next_token_id: int | None = None
    """The known token after the chunk, where logprobs of it are wanted; None: the chunk ends with the last prompt
    token. So the wanted ones are `token_ids[1:]` and this one."""

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


class PageCopy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All bytes of a page, in every layer and on every rank: a sequence that forks gets its own last page."""

    source: int
    target: int


class Batch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One forward pass. The engine first forgets `ended_sequences`, then learns `new_sequences`, makes `copies`, and
    computes `chunks`. A sequence may be in several of these: preempted, it ends, and begins again from token 0."""

    pass_index: int
    """Counts passes from 0 without gaps; fixes the layer counter's values (see `pdserve.layer_counter`)."""
    chunks: tuple[Chunk, ...]
    copies: tuple[PageCopy, ...] = ()
    """Made before anything is computed, in this order."""
    new_sequences: tuple[NewSequence, ...] = ()
    ended_sequences: tuple[SequenceId, ...] = ()
    """They were in batches before this one, and the engine forgets all about them."""


class BatchResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass_index: int
    sampled: tuple[tuple[SequenceId, tuple[int, ...]], ...]
    """For each chunk with `samples`, in the order of the chunks: the token sampled after the last known one, and as
    long as each is the draft in its place and does not end the answer, the next. All but the last have their KV."""
    logprobs: tuple[tuple[SequenceId, tuple[TokenLogprobs, ...]], ...] = ()
    """Of the sampled tokens of the sequences that ask for them."""
    prompt_logprobs: tuple[tuple[SequenceId, tuple[TokenLogprobs, ...]], ...] = ()
    """For each chunk with `num_prompt_logprobs`, in the order of the chunks: of its `token_ids[1:]`, and of its
    `next_token_id` where it has one."""
    drafts: tuple[tuple[SequenceId, tuple[int, ...]], ...] = ()
    """What the engine's drafter thinks comes after the sampled tokens; nothing where it has no guess."""
    started_ns: int
    ended_ns: int

"""Which passes and pushes a profile measures."""

import math
from dataclasses import dataclass
from itertools import product

from pdserve.errors import ConfigError
from pdserve.perfmodel.port import PassShape
from pdserve.perfmodel.sample import chunk_shape, decode_shape, mixed_shape
from pdserve.units import div_ceil

MIN_PREFILL_TOKENS = 64
"""The shortest longest prompt that leaves lengths to compare."""
KV_TOKENS_PER_PROMPT_TOKEN = 16
"""Decode passes hold at most this many tokens for each of the longest prompt: what bounds the measurement's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPoint:
    """One chunk of a prompt, and one token for each of some sequences; either may be missing."""

    chunk_start: int = 0
    chunk_tokens: int = 0
    num_sequences: int = 0
    context: int = 0
    """Tokens that each of the sequences holds before."""

    @property
    def shape(self) -> PassShape:
        return mixed_shape(
            chunk_shape(start=self.chunk_start, stop=self.chunk_start + self.chunk_tokens),
            decode_shape(num_sequences=self.num_sequences, context=self.context),
        )

    def pages_per_sequence(self, *, page_slots: int) -> int:
        return div_ceil(self.context + 1, page_slots)

    def num_pages(self, *, page_slots: int) -> int:
        chunk_pages = div_ceil(self.chunk_start + self.chunk_tokens, page_slots)
        return self.num_sequences * self.pages_per_sequence(page_slots=page_slots) + chunk_pages

    @property
    def sort_key(self) -> tuple[bool, bool, int, int, int, int]:
        """Prefill, decode, then both; by the numbers of each."""
        return (
            self.num_sequences > 0,
            self.chunk_tokens > 0,
            self.num_sequences,
            self.context,
            self.chunk_start,
            self.chunk_tokens,
        )


def pass_points(*, max_prompt_tokens: int, max_batch: int) -> tuple[PassPoint, ...]:
    """Prefill over length and start, decode over batch and context, and passes of both.

    Raises: `ConfigError` when there would be too few of a kind to hold some out.
    """
    if max_prompt_tokens < MIN_PREFILL_TOKENS:
        raise ConfigError(f"--max-prompt must be {MIN_PREFILL_TOKENS} or more, not {max_prompt_tokens}")
    if max_batch < 4:
        raise ConfigError(f"--max-batch must be 4 or more, not {max_batch}")
    return (
        *_prefill_points(max_prompt_tokens),
        *_decode_points(max_prompt_tokens, max_batch),
        *_mixed_points(max_prompt_tokens, max_batch),
    )


def _prefill_points(max_prompt_tokens: int) -> list[PassPoint]:
    """Whole prompts from a sixty-fourth of the longest, three lengths in two doublings, and chunks further behind."""
    longest = math.log2(max_prompt_tokens)
    lengths = sorted({round(2 ** (longest - 2 * third / 3)) for third in range(10)})
    whole = [PassPoint(chunk_tokens=length) for length in lengths]
    starts = (max_prompt_tokens // 2, max_prompt_tokens)
    chunks = (max_prompt_tokens // 16, max_prompt_tokens // 8, max_prompt_tokens // 4)
    return whole + [PassPoint(chunk_start=start, chunk_tokens=chunk) for start, chunk in product(starts, chunks)]


def _decode_points(max_prompt_tokens: int, max_batch: int) -> list[PassPoint]:
    batches = [batch for batch in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if batch <= max_batch]
    contexts = (max_prompt_tokens // 16, max_prompt_tokens // 4, max_prompt_tokens)
    return [
        PassPoint(num_sequences=batch, context=context)
        for batch, context in product(batches, contexts)
        if batch * context <= KV_TOKENS_PER_PROMPT_TOKEN * max_prompt_tokens
    ]


def _mixed_points(max_prompt_tokens: int, max_batch: int) -> list[PassPoint]:
    chunks = (max_prompt_tokens // 16, max_prompt_tokens // 8, max_prompt_tokens // 4)
    return [
        PassPoint(chunk_tokens=chunk, num_sequences=batch, context=max_prompt_tokens // 4)
        for chunk, batch in product(chunks, (max_batch // 4, max_batch // 2, max_batch))
    ]


def push_pages(*, max_prompt_tokens: int, page_slots: int) -> tuple[int, ...]:
    """Numbers of pages to push, two in each doubling, so that one that is held out has neighbours; up to those of the
    longest prompt."""
    most = div_ceil(max_prompt_tokens, page_slots)
    powers = [2**power for power in range(most.bit_length())]
    between = [power * 3 // 2 for power in powers if power > 1 and power * 3 // 2 <= most]
    return tuple(sorted([*powers, *between]))

"""What was measured: one time, of one pass or push, and the name of its source."""

from enum import Enum

import msgspec

from pdserve.perfmodel.port import PassShape


class PassKind(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class PassSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of a pass of this shape: measured, one that nobody disturbed."""

    shape: PassShape
    seconds: float
    source: str
    """A key of the profile's `sources`."""

    @property
    def kind(self) -> PassKind:
        if self.shape.num_decode_tokens == 0:
            return PassKind.PREFILL
        return PassKind.DECODE if self.shape.num_prefill_tokens == 0 else PassKind.MIXED


class PushSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The median time of a push of so many bytes."""

    num_bytes: int
    seconds: float
    source: str
    """As in `PassSample`."""


def chunk_shape(*, start: int, stop: int) -> PassShape:
    """Of the prompt tokens [start, stop) of one sequence, each of which attends to all before it and itself."""
    num_tokens = stop - start
    return PassShape(num_prefill_tokens=num_tokens, num_prefill_keys=(start + stop + 1) * num_tokens // 2)


def decode_shape(*, num_sequences: int, context: int) -> PassShape:
    """Of one token for each of these sequences, which hold `context` tokens before it."""
    return PassShape(num_decode_tokens=num_sequences, num_decode_keys=num_sequences * (context + 1))


def mixed_shape(prefill: PassShape, decode: PassShape) -> PassShape:
    return PassShape(
        num_prefill_tokens=prefill.num_prefill_tokens,
        num_prefill_keys=prefill.num_prefill_keys,
        num_decode_tokens=decode.num_decode_tokens,
        num_decode_keys=decode.num_decode_keys,
    )

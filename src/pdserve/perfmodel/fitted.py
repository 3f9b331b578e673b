"""The performance model that profiles are fitted to."""

import msgspec

from pdserve.errors import ConfigError
from pdserve.perfmodel.curve import Curve
from pdserve.perfmodel.port import PassShape


class FittedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `PerfModel`: dense layers by the pass's tokens, attention by its keys, and what only decode tokens cost.

    The dense layers see no difference between the tokens of a prompt and those of a generation, so one curve covers
    both, and so mixed passes too. It bends where a pass turns from bound by memory to bound by arithmetic.
    """

    provenance: str
    tokens_s: Curve
    """Of a pass, by its prefill and decode tokens together."""
    decode_tokens_s: Curve
    """What its decode tokens cost beyond that: sampling, and attention that shares no keys between tokens."""
    prefill_key_s: float
    decode_key_s: float
    push_bytes_s: Curve
    deviations: tuple[float, ...] = ()
    """As `PerfModel` says."""

    def __post_init__(self) -> None:
        if not all(0 < ratio < float("inf") for ratio in self.deviations):
            raise ConfigError("a performance model's deviations are positive and finite")
        if not (0 <= self.prefill_key_s < float("inf") and 0 <= self.decode_key_s < float("inf")):
            raise ConfigError("a performance model's seconds a key are finite and not negative")

    def pass_s(self, shape: PassShape) -> float:
        decode_tokens = shape.num_decode_tokens
        attention_s = self.prefill_key_s * shape.num_prefill_keys + self.decode_key_s * shape.num_decode_keys
        decode_s = self.decode_tokens_s(decode_tokens) if decode_tokens else 0.0
        return self.tokens_s(shape.num_prefill_tokens + decode_tokens) + decode_s + attention_s

    def push_s(self, num_bytes: int) -> float:
        return self.push_bytes_s(num_bytes)


def affine_model(
    *,
    provenance: str,
    pass_s: float,
    token_s: float,
    decode_token_s: float = 0.0,
    prefill_key_s: float = 0.0,
    decode_key_s: float = 0.0,
    push_s: float = 0.0,
    push_byte_s: float = 0.0,
) -> FittedModel:
    """The model without bends: a pass costs `pass_s` and something for each token and key; a push likewise."""
    return FittedModel(
        provenance=provenance,
        tokens_s=Curve(counts=(0, 1), seconds=(pass_s, pass_s + token_s)),
        decode_tokens_s=Curve(counts=(0, 1), seconds=(0.0, decode_token_s)),
        prefill_key_s=prefill_key_s,
        decode_key_s=decode_key_s,
        push_bytes_s=Curve(counts=(0, 1), seconds=(push_s, push_s + push_byte_s)),
    )

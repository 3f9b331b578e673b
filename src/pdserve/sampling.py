"""What one request asks of the sampler, and what is said of a sampled token. Used unchanged by gateway, wire, decode
and engine."""

import msgspec

MAX_STOP_TOKEN_IDS = 64
"""The decode worker compares each token with all of them."""

MAX_GRAMMAR_BYTES = 256 * 1024
"""Schemas that people write have a few KiB."""

MAX_LOGIT_BIASES = 300
MAX_TOP_LOGPROBS = 20
"""OpenAI's bounds."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Validated where the request enters (gateway); defaults are OpenAI's.

    Units: penalties and temperature are dimensionless, `seed` any 64-bit integer.
    """

    max_tokens: int
    """Most tokens to generate, at least 1; the gateway resolves the default to what the context leaves."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all."""
    min_p: float = 0.0
    """Least probability of a token, as a share of the likeliest one's; 0 means all."""
    seed: int | None = None
    """Same seed, same tokens: noise depends on (seed, position) alone. None: drawn by the gateway."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and what is added to its logit, each token once; at most `MAX_LOGIT_BIASES`."""
    min_tokens: int = 0
    """After so many tokens the answer may end by end of sequence, stop token or stop string; at most `max_tokens`."""
    stop: tuple[str, ...] = ()
    """Up to 4 strings; the text ends before the first that appears."""
    stop_token_ids: tuple[int, ...] = ()
    """Each ends the text as the end of sequence does, without text of its own; at most `MAX_STOP_TOKEN_IDS`."""
    ignore_eos: bool = False
    num_top_logprobs: int | None = None
    """None: no logprobs. Else those of each token of the answer, and of so many of the likeliest in its place; at most
    `MAX_TOP_LOGPROBS`."""
    num_prompt_logprobs: int | None = None
    """The same of each prompt token but the first. The prompt is prefilled on the decode worker then."""
    grammar: str | None = None
    """What the answer must match, as llguidance writes grammars; at most `MAX_GRAMMAR_BYTES`. The gateway has compiled
    it once, so that it can be."""
    skip_special_tokens: bool = True
    """False: special tokens are text of the answer, as in `<|im_end|>`; those that end it still are none."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one sampled token, in the model's own distribution: before biases, penalties and temperature.

    Units: natural logarithms of probabilities.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """Tokens with their logprobs, likeliest first; the sampled one may be among them."""

"""The fields that both completion APIs share, and what they ask of the sampler."""

import re
import secrets
from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.errors import ContextOverflow, InvalidField, UnsupportedField
from pdserve.gateway.fields import NoOps
from pdserve.gateway.structured_fields import StructuredFields
from pdserve.sampling import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS, SamplingParams
from pdserve.wire.cluster import MAX_CHOICES

MAX_LOGIT_BIAS = 100.0

MIN_TEMPERATURE = 1e-4
"""Under this, logits divided by the temperature overflow float32; the limit is greedy, which is what is meant."""

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]

SHARED_NO_OPS: NoOps = {
    "suffix": ("",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_special_tokens": (),
    "truncate_prompt_tokens": (),
    "priority": (0,),
}


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False
    """OpenAI's padding against those who measure the lengths of chunks; refused when true."""
    continuous_usage_stats: bool = False
    """vLLM's usage in every chunk; refused when true."""


class SamplingFields(StructuredFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranges are OpenAI's; null means the default, as there."""

    model: Annotated[str, Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 mean all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIASES)] | None = None
    """JSON's keys are strings: token ids in decimal."""
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """vLLM's extension: how many of the likeliest tokens are reported in the place of each prompt token."""
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    """vLLM's extension: false makes special tokens text of the answer."""
    return_token_ids: bool | None = None
    """vLLM's extension: each choice carries the ids of its tokens."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Who asks, in the client's words; changes nothing."""

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None when the client leaves it to us."""
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported beside each token; None: no logprobs at all."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As `num_top_logprobs`, of the prompt's tokens."""
        return self.prompt_logprobs

    @property
    def num_choices(self) -> int:
        """Answers to each prompt that the client gets."""
        return 1 if self.n is None else self.n

    @property
    def biases(self) -> dict[int, float]:
        """By token id. Raises: `InvalidField` for a key that is no token id, or a value out of range."""
        biases: dict[int, float] = {}
        for key, bias in (self.logit_bias or {}).items():
            if _TOKEN_ID.fullmatch(key) is None:
                raise InvalidField(f"'logit_bias' has the key {key!r}, which is no token id", param="logit_bias")
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise InvalidField(f"'logit_bias' of token {key} is {bias}, outside [-100, 100]", param="logit_bias")
            biases[int(key)] = bias
        return biases

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def require_consistent(self) -> None:
        """Raises: `InvalidField` when fields contradict each other, `UnsupportedField` when we don't combine them."""
        if self.stream and self.prompt_logprobs is not None:
            raise UnsupportedField("'prompt_logprobs' is not supported with 'stream'", param="prompt_logprobs")
        if self.stream_options is None:
            return
        if not self.stream:
            raise InvalidField("'stream_options' needs 'stream' to be true", param="stream_options")
        for name in ("include_obfuscation", "continuous_usage_stats"):
            if getattr(self.stream_options, name):
                param = f"stream_options.{name}"
                raise UnsupportedField(f"'{param}' is not supported; leave it out", param=param)


def sampling_params(
    fields: SamplingFields,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    default_max_tokens: int | None,
    prompt_param: str,
) -> SamplingParams:
    """What the sampler is asked; a seed is drawn where the sampler needs one and the client gave none.

    `default_max_tokens` is None where the default is all that the context leaves; `prompt_param` is the prompt's field.
    Raises: `ContextOverflow` when prompt and answer don't fit the context; `InvalidField` when they leave no room for
    `min_tokens`.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextOverflow(
            f"this model's context is {max_model_len} tokens and the prompt has {num_prompt_tokens}, "
            "which leaves none for the answer; shorten the prompt",
            param=prompt_param,
        )
    default = room if default_max_tokens is None else min(room, default_max_tokens)
    max_tokens = default if fields.token_limit is None else fields.token_limit
    if max_tokens > room:
        raise ContextOverflow(
            f"this model's context is {max_model_len} tokens and the prompt has {num_prompt_tokens}, "
            f"which leaves no {max_tokens} for the answer; ask for at most {room}",
            param="max_tokens",
        )
    if (fields.min_tokens or 0) > max_tokens:
        raise InvalidField(
            f"'min_tokens' is {fields.min_tokens}, more than the {max_tokens} tokens that there may be",
            param="min_tokens",
        )
    return _resolved(fields, max_tokens=max_tokens)


def _resolved(fields: SamplingFields, *, max_tokens: int) -> SamplingParams:
    temperature = 1.0 if fields.temperature is None else fields.temperature
    if temperature < MIN_TEMPERATURE:
        temperature = 0.0
    seed = secrets.randbits(63) if fields.seed is None and temperature > 0 else fields.seed
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(0, fields.top_k or 0),
        min_p=fields.min_p or 0.0,
        seed=seed,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        logit_bias=tuple(fields.biases.items()),
        min_tokens=fields.min_tokens or 0,
        stop=stop,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        num_top_logprobs=fields.num_top_logprobs,
        num_prompt_logprobs=fields.num_prompt_logprobs,
        skip_special_tokens=fields.skip_special_tokens is not False,
    )

"""What a decode role takes on: how much at a time, and what it never could."""

from dataclasses import dataclass

from pdserve.wire.cluster import MAX_CHOICES, Generate, Told


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    max_requests: int = 512
    """Requests in any phase; one more is refused with 429."""
    max_sequences: int = 1024
    """Choices of all these requests that have not finished; more are refused with 429."""
    max_model_len: int
    retry_after_s: float = 1.0
    handoff_timeout_s: float = 120.0
    """A handoff that has not landed by then is cancelled, and its prompt prefilled here: a prefill worker that is alive
    but stuck must not use up the whole time of a request."""


def why_impossible(generate: Generate, limits: DecodeLimits, *, num_kv_tokens: int) -> str | None:
    """Why a worker whose KV cache holds so many tokens could not answer even if it did nothing else; None: it can."""
    num_tokens = len(generate.prompt_token_ids) + generate.sampling.max_tokens
    max_choices = min(MAX_CHOICES, limits.max_sequences)
    if not generate.prompt_token_ids:
        return "the prompt has no tokens"
    if not 1 <= generate.num_choices <= max_choices:
        return f"{generate.num_choices} choices are outside [1, {max_choices}]"
    if num_tokens > limits.max_model_len:
        return f"{num_tokens} tokens (prompt and max_tokens) are over the context of {limits.max_model_len}"
    if num_tokens > num_kv_tokens:
        return (
            f"{num_tokens} tokens (prompt and max_tokens) do not fit this worker's KV cache of {num_kv_tokens}; "
            "lower max_tokens or raise --kv-tokens"
        )
    return _why_no_continuation(generate)


def _why_no_continuation(generate: Generate) -> str | None:
    """Why no answer can go on from what is said to have been told of it."""
    if not generate.told:
        return None
    if len(generate.told) != generate.num_choices:
        return f"{len(generate.told)} of {generate.num_choices} choices are said to have been told"
    if all(choice.is_finished for choice in generate.told):
        return "every choice is said to have finished"
    if not all(_can_go_on(choice, max_tokens=generate.sampling.max_tokens) for choice in generate.told):
        return "more of a choice is said to have been told than it can have"
    return None


def _can_go_on(told: Told, *, max_tokens: int) -> bool:
    num_tokens = len(told.token_ids)
    has_sane_counts = 0 <= told.num_entries <= num_tokens and told.num_text_chars >= 0
    return told.is_finished or (num_tokens < max_tokens and has_sane_counts)

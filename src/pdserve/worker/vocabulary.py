"""Token ids that others send, checked before they reach the engine, which has a row for each of its vocabulary."""

from collections.abc import Sequence

from pdserve.wire.cluster import Generate


def why_unknown(token_ids: Sequence[int], *, vocab_size: int, where: str) -> str | None:
    """None where the vocabulary has all of them. Cost: two passes in C, some 50 us for 5,000 tokens."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return None
    unknown = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    return f"token id {unknown} in {where} is outside the vocabulary [0, {vocab_size})"


def why_unknown_in(generate: Generate, *, vocab_size: int) -> str | None:
    """Of the prompt, and of what is said to have been told."""
    problem = why_unknown(generate.prompt_token_ids, vocab_size=vocab_size, where="the prompt")
    told = (why_unknown(choice.token_ids, vocab_size=vocab_size, where="an answer") for choice in generate.told)
    return problem or next(filter(None, told), None)

"""How what a step produced is cut into messages."""

from collections.abc import Iterable, Sequence

from pdserve.ids import RequestId
from pdserve.sampling import TokenLogprobs
from pdserve.wire.cluster import Delta


def split_deltas(deltas: Iterable[Delta], *, max_entries: int) -> list[tuple[Delta, ...]]:
    """In order, in as few parts as there can be that have at most so many entries, or one delta alone.

    The logprobs of a prompt's tokens are entries too.
    """
    parts: list[list[Delta]] = []
    num_entries = 0
    for delta in deltas:
        num_of_delta = len(delta.entries) + len(delta.prompt_logprobs)
        num_entries += num_of_delta
        if not parts or num_entries > max_entries:
            parts.append([])
            num_entries = num_of_delta
        parts[-1].append(delta)
    return [tuple(part) for part in parts]


def deltas_of_prompt(request_id: RequestId, entries: Sequence[TokenLogprobs], *, max_entries: int) -> list[Delta]:
    """Deltas without tokens, each of at most so many entries."""
    return [
        Delta(
            request_id=request_id,
            token_ids=(),
            text="",
            prompt_logprobs=tuple(entries[start : start + max_entries]),
        )
        for start in range(0, len(entries), max_entries)
    ]

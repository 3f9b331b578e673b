"""Whether a result is that of the batch it came back for."""

from pdserve.errors import InternalError
from pdserve.schedule.batch import Batch, BatchResult, Chunk


def require_matching(batch: Batch | None, result: BatchResult) -> Batch:
    """The batch. Raises: `InternalError` when the result is not its."""
    if batch is None or batch.pass_index != result.pass_index:
        running = "none" if batch is None else str(batch.pass_index)
        raise InternalError(f"pass {result.pass_index} came back, but the running one is {running}")
    sampling = [chunk for chunk in batch.chunks if chunk.samples]
    expected = [chunk.sequence_id for chunk in sampling]
    if [sequence_id for sequence_id, _ in result.sampled] != expected:
        raise InternalError(f"pass {result.pass_index} should have sampled for {expected}, not {result.sampled}")
    for chunk, (_, token_ids) in zip(sampling, result.sampled, strict=True):
        if chunk.num_drafts or len(token_ids) != 1:
            _require_tokens(chunk, token_ids)
    _require_what_goes_with_tokens(result)
    _require_prompt_logprobs(batch, result)
    return batch


def _require_what_goes_with_tokens(result: BatchResult) -> None:
    if not (result.logprobs or result.drafts):
        return
    counts = {sequence_id: len(token_ids) for sequence_id, token_ids in result.sampled}
    for sequence_id, entries in result.logprobs:
        if counts.get(sequence_id) != len(entries):
            raise InternalError(
                f"sequence {sequence_id} has logprobs of {len(entries)} tokens, and {counts.get(sequence_id)} tokens"
            )
    for sequence_id, _ in result.drafts:
        if sequence_id not in counts:
            raise InternalError(f"sequence {sequence_id} was not sampled, but has drafts")


def _require_tokens(chunk: Chunk, token_ids: tuple[int, ...]) -> None:
    """One token, and one more for each draft before it that was right."""
    drafts = chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]
    if not 1 <= len(token_ids) <= len(drafts) + 1 or token_ids[:-1] != drafts[: len(token_ids) - 1]:
        raise InternalError(
            f"sequence {chunk.sequence_id} got tokens {token_ids}, which do not go with drafts {drafts}"
        )


def _require_prompt_logprobs(batch: Batch, result: BatchResult) -> None:
    expected = [
        (chunk.sequence_id, len(chunk.token_ids) - (chunk.next_token_id is None))
        for chunk in batch.chunks
        if chunk.num_prompt_logprobs is not None
    ]
    counts = [(sequence_id, len(entries)) for sequence_id, entries in result.prompt_logprobs]
    if counts != expected:
        raise InternalError(
            f"pass {result.pass_index} should have prompt logprobs {expected} (sequence, tokens), not {counts}"
        )

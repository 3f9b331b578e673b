"""What a performance model is asked of a batch, and what comes of it."""

from pdserve.ids import SequenceId
from pdserve.perfmodel.port import PassShape
from pdserve.schedule.batch import Batch, BatchResult, Chunk
from pdserve.simulate.fleet.drafting import RankDrafter
from pdserve.simulate.fleet.silence import TOKEN_ID

SAMPLED = (TOKEN_ID,)


def shape_of(batch: Batch) -> PassShape:
    """A chunk of one known token that samples is a decode, as it is to the engine, and so are its drafts; all others
    are of prompts."""
    num_prefill_tokens = num_prefill_keys = num_decode_tokens = num_decode_keys = 0
    for chunk in batch.chunks:
        num_tokens, start = len(chunk.token_ids), chunk.start
        num_keys = (2 * start + num_tokens + 1) * num_tokens // 2
        if num_tokens == 1 + chunk.num_drafts and chunk.samples:
            num_decode_tokens += num_tokens
            num_decode_keys += num_keys
        else:
            num_prefill_tokens += num_tokens
            num_prefill_keys += num_keys
    return PassShape(
        num_prefill_tokens=num_prefill_tokens,
        num_prefill_keys=num_prefill_keys,
        num_decode_tokens=num_decode_tokens,
        num_decode_keys=num_decode_keys,
    )


def result_of(batch: Batch, *, drafter: RankDrafter | None, started_ns: int, ended_ns: int) -> BatchResult:
    """Every sequence that samples gets the one token there is: once, and once more for each draft that was right."""
    sampling = [chunk for chunk in batch.chunks if chunk.samples]
    sampled = tuple([(chunk.sequence_id, _sampled(chunk) if chunk.num_drafts else SAMPLED) for chunk in sampling])
    drafts: tuple[tuple[SequenceId, tuple[int, ...]], ...] = ()
    if drafter is not None:
        drafts = tuple(
            [
                (chunk.sequence_id, drafter.drafts(chunk.sequence_id, chunk.stop - chunk.num_drafts + len(token_ids)))
                for chunk, (_, token_ids) in zip(sampling, sampled, strict=True)
            ]
        )
    return BatchResult(
        pass_index=batch.pass_index, sampled=sampled, drafts=drafts, started_ns=started_ns, ended_ns=ended_ns
    )


def _sampled(chunk: Chunk) -> tuple[int, ...]:
    num_right = 0
    for token_id in chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]:
        if token_id != TOKEN_ID:
            break
        num_right += 1
    return SAMPLED * (1 + num_right)

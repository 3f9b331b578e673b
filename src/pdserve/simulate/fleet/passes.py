"""What a performance model is asked of a batch, and what comes of it."""

from pdserve.perfmodel.port import PassShape
from pdserve.schedule.batch import Batch, BatchResult
from pdserve.simulate.fleet.silence import TOKEN_ID

SAMPLED = (TOKEN_ID,)


def shape_of(batch: Batch) -> PassShape:
    """A chunk of one token that samples is a decode, as it is to the engine; all others are of prompts."""
    num_prefill_tokens = num_prefill_keys = num_decode_tokens = num_decode_keys = 0
    for chunk in batch.chunks:
        num_tokens, start = len(chunk.token_ids), chunk.start
        if num_tokens == 1 and chunk.samples:
            num_decode_tokens += 1
            num_decode_keys += start + 1
        else:
            num_prefill_tokens += num_tokens
            num_prefill_keys += (2 * start + num_tokens + 1) * num_tokens // 2
    return PassShape(
        num_prefill_tokens=num_prefill_tokens,
        num_prefill_keys=num_prefill_keys,
        num_decode_tokens=num_decode_tokens,
        num_decode_keys=num_decode_keys,
    )


def result_of(batch: Batch, *, started_ns: int, ended_ns: int) -> BatchResult:
    """Every sequence that samples gets the one token there is."""
    sampled = tuple([(chunk.sequence_id, SAMPLED) for chunk in batch.chunks if chunk.samples])
    return BatchResult(pass_index=batch.pass_index, sampled=sampled, started_ns=started_ns, ended_ns=ended_ns)

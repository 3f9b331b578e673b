"""Logprobs of sampled tokens, each row by itself.

Shape suffixes: V vocabulary.
"""

import torch

from pdserve.sampling import TokenLogprobs


def token_logprobs(logprobs_V: torch.Tensor, token_id: int, *, num_top: int) -> TokenLogprobs:
    """Requires: `logprobs_V` is the log-softmax of the model's logits, in host memory."""
    top = logprobs_V.topk(min(num_top, len(logprobs_V)))
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logprobs_V[token_id]),
        top=tuple((int(top_id), float(logprob)) for logprob, top_id in zip(*top, strict=True)),
    )

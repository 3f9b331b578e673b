"""Sampling parameters of every kind, for tests of the sampler and of what calls it."""

import torch
from hypothesis import strategies as st

from pdserve.ids import SequenceId
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import NewSequence

VOCAB_SIZE = 40


def params(
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: dict[int, float] | None = None,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    max_tokens: int = 100,
    num_top_logprobs: int | None = None,
    grammar: str | None = None,
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=tuple((logit_bias or {}).items()),
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        num_top_logprobs=num_top_logprobs,
        grammar=grammar,
    )


def new_sequence(
    sequence_id: int, sampling: SamplingParams, prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = ()
) -> NewSequence:
    return NewSequence(
        sequence_id=SequenceId(sequence_id), prompt_token_ids=prompt, output_token_ids=output, sampling=sampling
    )


def logits_of(seed: int, num_rows: int = 1, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


token_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20).map(tuple)
any_params = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, VOCAB_SIZE, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 0.6, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([-1.0, 0.0, 0.4]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, -1.5, 0.5, 3.0, 100.0]), max_size=4
    ),
    min_tokens=st.integers(0, 10),
    stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12).map(tuple),
)

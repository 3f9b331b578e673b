"""Sampling against an obvious reference, one row at a time; and what it must not depend on."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pure.sampling_cases import VOCAB_SIZE, any_params, logits_of, new_sequence, params, token_ids

from pdserve.engine.sampler import Sampler, draw_uniform
from pdserve.errors import InternalError
from pdserve.ids import SequenceId
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import NewSequence


def reference_token(logits: list[float], new: NewSequence) -> int:
    """The rules, one token of the vocabulary at a time."""
    sampling, counts = new.sampling, Counter(new.output_token_ids)
    for token_id, bias in sampling.logit_bias:
        logits[token_id] += bias
    for token_id in {*new.prompt_token_ids, *new.output_token_ids}:
        scale = sampling.repetition_penalty
        logits[token_id] = logits[token_id] / scale if logits[token_id] > 0 else logits[token_id] * scale
    for token_id, count in counts.items():
        logits[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
    if len(new.output_token_ids) < sampling.min_tokens:
        for token_id in sampling.stop_token_ids:
            logits[token_id] = -math.inf
    if sampling.temperature == 0:
        return max(range(len(logits)), key=lambda token_id: logits[token_id])
    highest = max(logits)
    weights = [math.exp((logit - highest) / sampling.temperature) for logit in logits]
    candidates = sorted(range(len(weights)), key=lambda token_id: -weights[token_id])
    if sampling.top_k > 0:
        candidates = candidates[: sampling.top_k]
    total = sum(weights[token_id] for token_id in candidates)
    if sampling.top_p < 1:
        kept: list[int] = []
        for token_id in candidates:
            if kept and sum(weights[other] for other in kept) >= sampling.top_p * total:
                break
            kept.append(token_id)
        candidates = kept
    candidates = [token_id for token_id in candidates if weights[token_id] >= sampling.min_p]
    if sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0:
        candidates = sorted(candidates)
    share = draw_uniform(seed=sampling.seed or 0, position=len(new.output_token_ids))
    share *= sum(weights[token_id] for token_id in candidates)
    for token_id in candidates:
        share -= weights[token_id]
        if share < 0:
            return token_id
    return candidates[-1]


@given(sampling=any_params, prompt=token_ids, output=token_ids, logits_seed=st.integers(0, 10_000))
@settings(max_examples=300)
def test_token_of_any_parameters_equals_the_reference(
    sampling: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...], logits_seed: int
) -> None:
    new = new_sequence(1, sampling, prompt, output)
    logits_RV = logits_of(logits_seed)
    expected = reference_token([float(logit) for logit in logits_RV[0]], new)
    sampler = Sampler(vocab_size=VOCAB_SIZE)
    sampler.add(new)
    assert sampler.sample(logits_RV, [SequenceId(1)]) == [expected]


@given(rows=st.lists(any_params, min_size=2, max_size=6), logits_seed=st.integers(0, 1000))
def test_tokens_of_a_batch_equal_those_of_each_row_alone(rows: list[SamplingParams], logits_seed: int) -> None:
    logits_RV = logits_of(logits_seed, num_rows=len(rows))
    together = Sampler(vocab_size=VOCAB_SIZE)
    alone: list[int] = []
    for index, sampling in enumerate(rows):
        together.add(new_sequence(index, sampling))
        single = Sampler(vocab_size=VOCAB_SIZE)
        single.add(new_sequence(index, sampling))
        alone += single.sample(logits_RV[index : index + 1].clone(), [SequenceId(index)])
    assert together.sample(logits_RV, [SequenceId(index) for index in range(len(rows))]) == alone


def generate(sampler: Sampler, num_tokens: int, *, first_logits_seed: int = 0) -> list[int]:
    generated: list[int] = []
    for step in range(num_tokens):
        generated += sampler.sample(logits_of(first_logits_seed + step), [SequenceId(1)])
    return generated


def test_generation_resumed_after_preemption_equals_the_uninterrupted_one() -> None:
    sampling = params(seed=7, frequency_penalty=0.5, repetition_penalty=1.2, top_p=0.95)
    sampler = Sampler(vocab_size=VOCAB_SIZE)
    sampler.add(new_sequence(1, sampling, prompt=(3, 4)))
    whole = generate(sampler, 12)
    resumed = Sampler(vocab_size=VOCAB_SIZE)
    resumed.add(new_sequence(1, sampling, prompt=(3, 4), output=tuple(whole[:5])))
    assert generate(resumed, 7, first_logits_seed=5) == whole[5:]


def test_seeds_that_differ_in_one_bit_draw_different_numbers() -> None:
    seeds = [0, 1, 2**63, 2**63 + 1, 2**64 - 1]
    assert len({draw_uniform(seed=seed, position=5) for seed in seeds}) == len(seeds)


def test_different_seeds_give_different_texts() -> None:
    texts: set[tuple[int, ...]] = set()
    for seed in range(10):
        sampler = Sampler(vocab_size=VOCAB_SIZE)
        sampler.add(new_sequence(1, params(seed=seed, temperature=2.0)))
        texts.add(tuple(generate(sampler, 8)))
    assert len(texts) == 10


def test_draws_over_many_positions_follow_the_probabilities() -> None:
    sampler = Sampler(vocab_size=4)
    sampler.add(new_sequence(1, params(seed=11)))
    probabilities = [0.5, 0.25, 0.2, 0.05]
    logits_RV = torch.tensor([probabilities]).log()
    num_draws = 4000
    counts = Counter(sampler.sample(logits_RV.clone(), [SequenceId(1)])[0] for _ in range(num_draws))
    for token_id, probability in enumerate(probabilities):
        spread = 5 * math.sqrt(num_draws * probability * (1 - probability))
        assert abs(counts[token_id] - num_draws * probability) < spread


def test_top_p_over_a_flat_vocabulary_looks_past_the_first_candidates() -> None:
    vocab_size = 5000
    sampler = Sampler(vocab_size=vocab_size)
    sampler.add(new_sequence(1, params(seed=3, top_p=0.9)))
    nearly_flat_RV = torch.arange(vocab_size)[None, :] * -1e-6
    drawn = [sampler.sample(nearly_flat_RV.clone(), [SequenceId(1)])[0] for _ in range(200)]
    assert max(drawn) > vocab_size * 0.8
    assert max(drawn) < vocab_size * 0.9 + 1


def test_min_p_over_a_flat_vocabulary_looks_past_the_first_candidates() -> None:
    vocab_size = 5000
    sampler = Sampler(vocab_size=vocab_size)
    sampler.add(new_sequence(1, params(seed=3, min_p=0.5)))
    halving_at_4000_RV = torch.arange(vocab_size)[None, :] * (-math.log(2) / 4000)
    drawn = [sampler.sample(halving_at_4000_RV.clone(), [SequenceId(1)])[0] for _ in range(200)]
    assert 3500 < max(drawn) <= 4000


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_token_that_ends_the_answer_is_not_sampled_before_min_tokens(temperature: float) -> None:
    """Not even one with the highest bias; a stop token that the model does not have is none."""
    sampling = params(
        temperature=temperature,
        min_tokens=3,
        stop_token_ids=(2, VOCAB_SIZE + 7),
        logit_bias={2: 100.0},
        repetition_penalty=0.5,
    )
    sampler = Sampler(vocab_size=VOCAB_SIZE)
    sampler.add(new_sequence(1, sampling, prompt=(2,)))
    generated = generate(sampler, 4)
    assert 2 not in generated[:3] and generated[3] == 2


def test_sequence_that_was_forgotten_is_no_longer_known() -> None:
    sampler = Sampler(vocab_size=VOCAB_SIZE)
    sampler.add(new_sequence(1, params()))
    sampler.forget([SequenceId(1), SequenceId(2)])
    assert not sampler.knows(SequenceId(1))


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    sampler = Sampler(vocab_size=VOCAB_SIZE)
    with pytest.raises(InternalError, match="outside the vocabulary"):
        sampler.add(new_sequence(1, params(), prompt=(token_id,)))
    with pytest.raises(InternalError, match="outside the vocabulary"):
        sampler.add(new_sequence(1, params(logit_bias={token_id: 1.0})))

"""Drafts never change an answer: neither its tokens, nor their logprobs, nor how they are distributed."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.pure.sampling_cases import VOCAB_SIZE, any_params, logits_of, new_sequence, params

from pdserve.engine.pass_rows import place_chunks, sampling_levels
from pdserve.engine.sampler import Sampler
from pdserve.engine.verification import Verified, verify
from pdserve.ids import SequenceId
from pdserve.sampling import SamplingParams, TokenLogprobs
from pdserve.schedule.batch import Chunk

PROMPT: tuple[int, ...] = (1, 2)
NUM_TOKENS = 12


def logits_after(tokens: Sequence[int]) -> torch.Tensor:
    """A model that remembers all tokens: logits_1V."""
    return logits_of(hash(tuple(tokens)) % 2**32)


def decode_chunk(sequence_id: int, tokens: Sequence[int], drafts: Sequence[int]) -> Chunk:
    return Chunk(
        sequence_id=SequenceId(sequence_id),
        start=len(tokens) - 1,
        token_ids=(tokens[-1], *drafts),
        page_indices=(0,),
        samples=True,
        num_drafts=len(drafts),
    )


def verify_pass(sampler: Sampler, known: dict[int, list[int]], drafts: Mapping[int, Sequence[int]]) -> list[Verified]:
    """One pass over all sequences."""
    placed = place_chunks([decode_chunk(each, tokens, drafts[each]) for each, tokens in known.items()])
    levels = sampling_levels(placed)
    logits = [
        logits_after([*known[each.chunk.sequence_id], *each.chunk.token_ids[1 : 1 + level]])
        for level, chunks in enumerate(levels)
        for each in chunks
    ]
    return verify(levels, torch.cat(logits), sampler)


def generate(
    sampling: Sequence[SamplingParams], choose_drafts: Callable[[int, int], Sequence[int]]
) -> list[tuple[list[int], list[TokenLogprobs]]]:
    """Whole answers, side by side; `choose_drafts(sequence, num_generated)` before each pass."""
    sampler = Sampler(vocab_size=VOCAB_SIZE)
    for index, each in enumerate(sampling):
        sampler.add(new_sequence(index, each, PROMPT))
    known = {index: list(PROMPT) for index in range(len(sampling))}
    logprobs: dict[int, list[TokenLogprobs]] = {index: [] for index in known}
    going = dict(known)
    while going:
        drafts = {index: choose_drafts(index, len(tokens) - len(PROMPT)) for index, tokens in going.items()}
        for verified in verify_pass(sampler, going, drafts):
            assert verified.token_ids[:-1] == list(drafts[verified.sequence_id][: len(verified.token_ids) - 1])
            known[verified.sequence_id] += verified.token_ids
            logprobs[verified.sequence_id] += verified.logprobs
        going = {index: tokens for index, tokens in going.items() if not sampler.has_ended(SequenceId(index))}
    return [(known[index][len(PROMPT) :], logprobs[index]) for index in known]


@given(
    rows=st.lists(any_params, min_size=1, max_size=4),
    num_top_logprobs=st.sampled_from([None, 0, 2]),
    luck=st.randoms(use_true_random=False),
)
@settings(max_examples=40)
def test_tokens_and_logprobs_with_any_drafts_equal_those_without(
    rows: list[SamplingParams], num_top_logprobs: int | None, luck: Random
) -> None:
    sampling = [replace(each, num_top_logprobs=num_top_logprobs, max_tokens=NUM_TOKENS) for each in rows]
    plain = generate(sampling, lambda index, num_generated: ())

    def mostly_right(index: int, num_generated: int) -> list[int]:
        right = [*plain[index][0][num_generated:], 7, 8, 9]
        return [luck.randrange(VOCAB_SIZE) if luck.random() < 0.2 else each for each in right[: luck.randrange(5)]]

    assert generate(sampling, mostly_right) == plain
    for tokens, logprobs in plain:
        assert [entry.token_id for entry in logprobs] == (tokens if num_top_logprobs is not None else [])
        for place, entry in enumerate(logprobs):
            expected_V = logits_after([*PROMPT, *tokens[:place]])[0].log_softmax(dim=-1)
            assert entry.logprob == float(expected_V[entry.token_id])


def test_right_drafts_are_all_kept_up_to_the_token_that_ends_the_answer() -> None:
    """The end is no guess that goes on, though it was guessed; a token that may not end yet is."""
    sampling = params(temperature=0, stop_token_ids=(3, 5), min_tokens=2, logit_bias={7: 100.0})
    sampler = Sampler(vocab_size=VOCAB_SIZE)
    sampler.add(new_sequence(0, sampling, PROMPT))
    (first,) = verify_pass(sampler, {0: [1, 2]}, {0: (7, 7)})
    assert (first.token_ids, first.num_kept) == ([7, 7, 7], 3)
    assert not sampler.has_ended(SequenceId(0))
    ending = params(temperature=0, stop_token_ids=(7,), logit_bias={7: 100.0})
    sampler.add(new_sequence(1, ending, PROMPT))
    (last,) = verify_pass(sampler, {1: [1, 2]}, {1: (7, 7)})
    assert (last.token_ids, last.num_kept) == ([7], 1)
    assert sampler.has_ended(SequenceId(1))


def test_chunks_with_and_without_drafts_are_verified_in_one_pass() -> None:
    sampler = Sampler(vocab_size=VOCAB_SIZE)
    greedy = params(temperature=0)
    for index in range(4):
        sampler.add(new_sequence(index, greedy, PROMPT))
    known = {index: [1, 2, index] for index in range(4)}
    best = {index: greedy_tokens(tokens, 4) for index, tokens in known.items()}
    drafts = {0: (), 1: best[1][:3], 2: (best[2][0], VOCAB_SIZE - 1, best[2][2]), 3: best[3][:1]}
    verified = verify_pass(sampler, known, drafts)
    assert [each.token_ids for each in verified] == [best[0][:1], best[1][:4], best[2][:2], best[3][:2]]
    assert [each.num_kept for each in verified] == [1, 4, 2, 2]


def greedy_tokens(tokens: Sequence[int], num_tokens: int) -> list[int]:
    generated = list(tokens)
    for _ in range(num_tokens):
        generated.append(int(logits_after(generated).argmax()))
    return generated[len(tokens) :]


PROBABILITIES = ((0.5, 0.25, 0.2, 0.05), (0.1, 0.6, 0.0, 0.3))
"""Of the token in the place of the draft, and of the one after it."""
CHI_SQUARE_1_IN_100_000 = {1: 19.5, 2: 23.0, 3: 25.9}
"""By degrees of freedom."""


@pytest.mark.parametrize(
    ("draft", "temperature", "top_p"), [(0, 1.0, 1.0), (3, 2.0, 1.0), (1, 1.0, 0.7), (3, 1.0, 0.7)]
)
def test_tokens_at_and_after_a_draft_are_distributed_as_the_model_says(
    draft: int, temperature: float, top_p: float
) -> None:
    num_sequences = 2000
    sampler = Sampler(vocab_size=4)
    for index in range(num_sequences):
        sampler.add(new_sequence(index, params(seed=index, temperature=temperature, top_p=top_p)))
    placed = place_chunks([decode_chunk(index, (1,), (draft,)) for index in range(num_sequences)])
    logits_RV = torch.cat([torch.tensor([row]).log().expand(num_sequences, -1) for row in PROBABILITIES])
    verified = verify(sampling_levels(placed), logits_RV.clone(), sampler)
    expected_at, expected_after = [shares(row, temperature=temperature, top_p=top_p) for row in PROBABILITIES]
    require_distribution([each.token_ids[0] for each in verified], expected_at)
    accepted = [each.token_ids[1] for each in verified if each.token_ids[0] == draft]
    assert all(len(each.token_ids) == 1 + (each.token_ids[0] == draft) for each in verified)
    if expected_at[draft] > 0:
        require_distribution(accepted, expected_after)


def shares(probabilities: Sequence[float], *, temperature: float, top_p: float) -> list[float]:
    likeliest = sorted(range(len(probabilities)), key=lambda token_id: -probabilities[token_id])
    kept: list[int] = []
    for token_id in likeliest:
        if sum(probabilities[other] for other in kept) < top_p:
            kept.append(token_id)
    weights = [
        math.pow(each, 1 / temperature) if token_id in kept else 0.0 for token_id, each in enumerate(probabilities)
    ]
    return [weight / sum(weights) for weight in weights]


def require_distribution(drawn: Sequence[int], expected: Sequence[float]) -> None:
    counts = Counter(drawn)
    possible = [token_id for token_id, share in enumerate(expected) if share > 0]
    assert set(counts) <= set(possible)
    chi_square = sum(
        (counts[token_id] - len(drawn) * expected[token_id]) ** 2 / (len(drawn) * expected[token_id])
        for token_id in possible
    )
    if len(possible) > 1:
        assert chi_square < CHI_SQUARE_1_IN_100_000[len(possible) - 1]


@given(sampling=any_params, num_ahead=st.integers(1, 4))
def test_proposal_is_what_the_sampler_draws_there_where_no_penalty_changes(
    sampling: SamplingParams, num_ahead: int
) -> None:
    """The logits are the model's own, so every proposal is accepted."""
    sampling = replace(sampling, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
    sampler = Sampler(vocab_size=VOCAB_SIZE)
    sampler.add(new_sequence(0, sampling))
    proposed = sampler.propose(logits_of(num_ahead), [SequenceId(0)], num_ahead)
    drawn = [sampler.sample(logits_of(step), [SequenceId(0)]) for step in range(1, num_ahead + 1)]
    assert drawn[-1] == proposed


def test_proposal_leaves_no_trace_and_knows_of_penalties() -> None:
    sampling = params(seed=4, repetition_penalty=1.5, frequency_penalty=0.5)
    plain, asked = [Sampler(vocab_size=VOCAB_SIZE) for _ in range(2)]
    for sampler in (plain, asked):
        sampler.add(new_sequence(0, sampling))
    for step in range(10):
        proposed = asked.propose(logits_of(step), [SequenceId(0)], 1)
        asked.propose(logits_of(99), [SequenceId(0)], 3)
        assert plain.sample(logits_of(step), [SequenceId(0)]) == proposed
        assert asked.sample(logits_of(step), [SequenceId(0)]) == proposed

"""A pass of a whole engine of one rank, in this process: drafts, forks, prompt logprobs, and what it refuses.

The model has random weights, so its answers are no text, but each token depends on all before it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.pure.drafting_engine import GREEDY, NUM_PAGES, SEEDED, DraftingEngine, Generating, spec_of
from tests.pure.tiny_checkpoints import VOCAB_SIZE, random_tokens, reference_logits, write_checkpoint

from pdserve.engine.port import EngineSpec
from pdserve.errors import InternalError
from pdserve.ids import SequenceId
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import Chunk, PageCopy

PROMPTS = [random_tokens(seed, num_tokens) for seed, num_tokens in ((1, 13), (2, 30), (3, 1))]
PAGES = [(4, 9, 2, 11, 30), (1, 3, 5, 7, 20, 21, 22), (0, 8, 16)]
PENALISED = replace(SEEDED, repetition_penalty=1.4, presence_penalty=0.3, min_tokens=5, stop_token_ids=(7, 8))
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint that runs on the native kernels, and what it is to transformers."""
    model_dir = tmp_path_factory.mktemp("qwen3")
    return model_dir, write_checkpoint("qwen3", model_dir)


@pytest.fixture(scope="module")
def spec(reference: tuple[Path, Any]) -> EngineSpec:
    return spec_of(reference[0])


def sequence(index: int, sampling: SamplingParams) -> Generating:
    return Generating(
        sequence_id=SequenceId(index), prompt=PROMPTS[index], page_indices=PAGES[index], sampling=sampling
    )


def generate_together(spec: EngineSpec, guessed: Mapping[int, Sequence[int]]) -> tuple[list[list[int]], int]:
    """Three sequences in one batch, each with its next drafts out of a whole answer; and how many passes it took."""
    engine = DraftingEngine(spec)
    sequences = [sequence(index, sampling) for index, sampling in enumerate((GREEDY, SEEDED, PENALISED))]
    num_passes = 0
    while going := [each for each in sequences if len(each.output) < NUM_TOKENS]:
        num_passes += 1
        for each in going:
            each.drafts = tuple(guessed[each.sequence_id][len(each.output) :][:3])
        chunks = [each.chunk() for each in going]
        news = [each.announcement() for each in going if not each.output]
        result = engine.run(*chunks, new_sequences=news)
        assert [sequence_id for sequence_id, _ in result.sampled] == [each.sequence_id for each in going]
        for each, chunk in zip(going, chunks, strict=True):
            each.take(chunk, result)
    return [each.output[:NUM_TOKENS] for each in sequences], num_passes


def test_tokens_with_drafts_right_and_wrong_equal_those_without(spec: EngineSpec) -> None:
    plain, num_passes = generate_together(spec, {0: (), 1: (), 2: ()})
    assert num_passes == NUM_TOKENS
    assert generate_together(spec, dict(enumerate(plain))) == (plain, NUM_TOKENS / 4)
    spoilt = [[3 if place % 5 == 1 else token_id for place, token_id in enumerate(each)] for each in plain]
    tokens, num_passes = generate_together(spec, dict(enumerate(spoilt)))
    assert tokens == plain and NUM_TOKENS / 4 < num_passes < NUM_TOKENS


def test_forked_sequences_answer_as_those_that_computed_the_prompt_themselves(spec: EngineSpec) -> None:
    """They share the full page; the last one is copied, and copied on."""
    num_choices = 3
    own_pages = [(9, 10), (11, 12), (13, 14)]
    sampling = [replace(SEEDED, seed=seed) for seed in range(num_choices)]
    alone = [
        Generating(prompt=PROMPTS[0], page_indices=PAGES[0], sampling=each).generate(DraftingEngine(spec), 6)
        for each in sampling
    ]
    engine = DraftingEngine(spec)
    engine.run(replace(sequence(0, GREEDY).chunk(12), page_indices=(4, 9)))
    choices = [
        Generating(
            sequence_id=SequenceId(index),
            prompt=PROMPTS[0],
            page_indices=(4, *own_pages[index]),
            sampling=each,
            num_computed=12,
        )
        for index, each in enumerate(sampling)
    ]
    copies = [PageCopy(source=9, target=11), PageCopy(source=11, target=13)]
    while len(choices[0].output) < 6:
        chunks = [each.chunk() for each in choices]
        news = [each.announcement() for each in choices if not each.output]
        result = engine.run(*chunks, new_sequences=news, copies=copies)
        for each, chunk in zip(choices, chunks, strict=True):
            each.take(chunk, result)
        copies = []
    assert [each.output for each in choices] == alone
    assert len({tuple(each) for each in alone}) == num_choices


def test_fields_that_change_logits_do_so_on_a_model_without_kernels_too(tmp_path: Path) -> None:
    """Its logits come out of torch's inference mode, which forbids others to change them."""
    write_checkpoint("qwen3-moe", tmp_path)
    spec = spec_of(tmp_path)
    biased = replace(PENALISED, logit_bias=((11, 200.0),))
    output = sequence(0, biased).generate(DraftingEngine(spec), 4)
    assert output == [11] * 4


@pytest.mark.parametrize("cuts", [(), (1, 33, 34)])
def test_prompt_logprobs_are_the_model_s_own_whatever_the_chunks(
    cuts: tuple[int, ...], reference: tuple[Path, Any]
) -> None:
    """Of more tokens than are computed at once. Drafts are no prompt."""
    prompt = random_tokens(5, 40)
    engine = DraftingEngine(spec_of(reference[0]))
    told: list[Any] = []
    asking = Generating(prompt=prompt, page_indices=(1, 2, 3, 4, 5, 6), drafts=(3, 4))
    for stop in (*cuts, None):
        chunk = replace(asking.chunk(stop), num_prompt_logprobs=2, next_token_id=None if stop is None else prompt[stop])
        result = engine.run(chunk, new_sequences=[asking.announcement()] if stop is None else [])
        asking.num_computed = chunk.stop
        ((sequence_id, entries),) = result.prompt_logprobs
        assert sequence_id == asking.sequence_id
        told += entries
    expected_TV = reference_logits(reference[1], prompt).log_softmax(dim=-1)
    assert [entry.token_id for entry in told] == prompt[1:]
    for entry, expected_V in zip(told, expected_TV, strict=False):
        assert entry.logprob == pytest.approx(float(expected_V[entry.token_id]), abs=1e-4)
        best = [int(token_id) for token_id in expected_V.topk(2).indices]
        assert [token_id for token_id, _ in entry.top] == best
        assert [logprob for _, logprob in entry.top] == pytest.approx(
            [float(expected_V[each]) for each in best], abs=1e-4
        )


def test_sequence_may_end_and_begin_again_in_one_batch(spec: EngineSpec) -> None:
    """Preempted: its penalties go on from the output it brings."""
    sampling = replace(GREEDY, repetition_penalty=1.8)
    whole = Generating(prompt=PROMPTS[0], page_indices=PAGES[0], sampling=sampling)
    whole.generate(DraftingEngine(spec), 8)
    engine = DraftingEngine(spec)
    preempted = Generating(prompt=PROMPTS[0], page_indices=PAGES[0], sampling=sampling)
    preempted.generate(engine, 4)
    preempted.num_computed = 0
    chunk = preempted.chunk()
    result = engine.run(chunk, new_sequences=[preempted.announcement()], ended_sequences=[preempted.sequence_id])
    preempted.take(chunk, result)
    assert preempted.generate(engine, 8) == whole.output


KNOWN = Chunk(sequence_id=SequenceId(1), start=0, token_ids=(1, 2, 3), page_indices=(2,), samples=True)


@pytest.mark.parametrize(
    ("chunk", "copies", "message"),
    [
        (replace(KNOWN, num_drafts=3), (), "3 drafts leave none of 3 tokens to be known"),
        (replace(KNOWN, num_drafts=-1), (), "-1 drafts leave none"),
        (replace(KNOWN, num_drafts=1, samples=False), (), "has 1 drafts, but does not sample"),
        (replace(KNOWN, num_drafts=1, tail_slot=0), (), "last position is a draft"),
        (replace(KNOWN, carry_slot=4), (), r"carry slot 4 is outside \[0, 4\)"),
        (replace(KNOWN, next_token_id=5, num_prompt_logprobs=0), (), "samples where the next token is known"),
        (replace(KNOWN, next_token_id=VOCAB_SIZE, samples=False), (), "a token is outside"),
        (KNOWN, (PageCopy(source=NUM_PAGES, target=1),), r"source=32, target=1\) is outside \[0, 32\)"),
        (KNOWN, (PageCopy(source=0, target=-1),), "target=-1"),
        (replace(KNOWN, page_indices=(NUM_PAGES,)), (PageCopy(source=0, target=1),), "a page is outside"),
    ],
)
def test_chunk_that_breaks_the_contract_is_refused_before_a_byte_is_written(
    chunk: Chunk, copies: tuple[PageCopy, ...], message: str, spec: EngineSpec
) -> None:
    engine = DraftingEngine(spec)
    engine.kv[:, 0] = 7
    before = engine.kv.copy()
    news = [Generating(prompt=(1, 2, 3), page_indices=(2,)).announcement()]
    with pytest.raises(InternalError, match=message):
        engine.run(chunk, copies=copies, new_sequences=news)
    assert np.array_equal(engine.kv, before)

"""Drafters that are models, in a whole engine: what they guess, what they cache, and that they change no answer."""

from dataclasses import dataclass

import numpy as np
import pytest
from tests.pure.drafting_engine import (
    GREEDY,
    NUM_PAGES,
    PAGE_SLOTS,
    SEEDED,
    DraftingEngine,
    Generating,
    hand_over,
    spec_of,
)
from tests.pure.tiny_checkpoints import NUM_LAYERS, random_tokens, write_checkpoint
from tests.pure.tiny_heads import write_deepseek_with_mtp, write_eagle

from pdserve.config.speculation import Drafter
from pdserve.engine.port import EngineSpec
from pdserve.errors import InternalError
from pdserve.ids import SequenceId
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import PageCopy

PROMPT = random_tokens(3, 29)
PAGES = (5, 9, 2, 7, 11, 0, 3, 21)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineSpec]:
    """By drafter, each with a checkpoint that it goes with; `itself` is a draft model that is the model."""
    llama, qwen3, eagle, deepseek = (tmp_path_factory.mktemp(name) for name in ("llama", "qwen3", "eagle", "deepseek"))
    write_checkpoint("llama", llama)
    write_checkpoint("qwen3", qwen3)
    write_eagle(eagle)
    write_deepseek_with_mtp(deepseek)
    return {
        "none": spec_of(llama),
        "itself": spec_of(llama, Drafter.DRAFT_MODEL, llama),
        "draft": spec_of(llama, Drafter.DRAFT_MODEL, qwen3),
        "eagle": spec_of(llama, Drafter.EAGLE, eagle),
        "mtp": spec_of(deepseek, Drafter.MTP),
        "none-of-deepseek": spec_of(deepseek),
    }


DRAFTERS = ("draft", "eagle", "mtp")
HEADS = ("eagle", "mtp")


def without_drafter(name: str) -> str:
    return "none-of-deepseek" if name == "mtp" else "none"


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_draft_model_that_is_the_model_guesses_every_token(
    sampling: SamplingParams, specs: dict[str, EngineSpec]
) -> None:
    answer = Generating(prompt=PROMPT, page_indices=PAGES, sampling=sampling)
    answer.generate(DraftingEngine(specs["itself"]), 24, cuts=[10])
    assert answer.num_drafts == answer.num_accepted > 15


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", ["itself", *DRAFTERS])
def test_drafter_changes_no_token(name: str, sampling: SamplingParams, specs: dict[str, EngineSpec]) -> None:
    guessed = Generating(prompt=PROMPT, page_indices=PAGES, sampling=sampling)
    plain = Generating(prompt=PROMPT, page_indices=PAGES, sampling=sampling)
    expected = plain.generate(DraftingEngine(specs[without_drafter(name)]), 24)
    assert guessed.generate(DraftingEngine(specs[name]), 24) == expected
    assert guessed.num_drafts > 0


def assert_same_cache(name: str, found: DraftingEngine, expected: DraftingEngine, *, num_slots: int) -> None:
    """Bit by bit; but a model with latent attention computes single tokens in another way, so its hidden states, which
    are read by the head, differ in the last bits."""
    found_vectors, expected_vectors = (engine.draft_vectors(PAGES, num_slots) for engine in (found, expected))
    assert expected_vectors.any(axis=-1).all()
    if name == "mtp":
        np.testing.assert_allclose(found_vectors, expected_vectors, atol=1e-4)
    else:
        assert np.array_equal(found_vectors, expected_vectors)


@pytest.mark.parametrize("name", ["itself", *DRAFTERS])
def test_cache_of_a_drafter_is_the_same_for_any_cuts(name: str, specs: dict[str, EngineSpec]) -> None:
    whole, cut = DraftingEngine(specs[name]), DraftingEngine(specs[name])
    Generating(prompt=PROMPT, page_indices=PAGES).step(whole, stop=len(PROMPT))
    answer = Generating(prompt=PROMPT, page_indices=PAGES)
    for stop in (1, 2, 10, 16, 28, 29):
        answer.step(cut, stop=stop)
    assert_same_cache(name, cut, whole, num_slots=len(PROMPT) - 1)
    is_model = name in ("itself", "draft")
    assert cut.draft_vectors(PAGES, len(PROMPT))[:, :, -1].any() == is_model


@pytest.mark.parametrize("name", ["itself", *DRAFTERS])
def test_cache_of_a_drafter_after_guesses_is_that_of_the_tokens_alone(name: str, specs: dict[str, EngineSpec]) -> None:
    """Right guesses stay, wrong ones are overwritten."""
    engine, whole = DraftingEngine(specs[name]), DraftingEngine(specs[name])
    answer = Generating(prompt=PROMPT, page_indices=PAGES, sampling=SEEDED)
    answer.generate(engine, 20)
    known = [*PROMPT, *answer.output][: answer.num_computed]
    Generating(prompt=known, page_indices=PAGES).step(whole, stop=len(known))
    assert_same_cache(name, engine, whole, num_slots=len(known) - 1)


def in_batch() -> list[Generating]:
    """The first one has no room for four guesses."""
    return [
        Generating(sequence_id=SequenceId(index), prompt=random_tokens(index, num_tokens), page_indices=page_indices)
        for index, (num_tokens, page_indices) in enumerate(
            [(13, (0, 5)), (7, (1, 2, 3)), (20, (8, 7, 6)), (9, (11, 12))]
        )
    ]


@pytest.mark.parametrize("name", ["itself", *DRAFTERS])
def test_guesses_in_a_batch_are_those_of_each_sequence_alone(name: str, specs: dict[str, EngineSpec]) -> None:
    """Two that decode, one that is prefilled whole, one in part."""
    together, alone = DraftingEngine(specs[name]), DraftingEngine(specs[name])
    found, expected = in_batch(), in_batch()
    for sequence in found[:2]:
        sequence.step(together)
    chunks = [found[0].chunk(), found[1].chunk(), found[2].chunk(9), found[3].chunk()]
    result = together.run(*chunks, new_sequences=[found[3].announcement()])
    for sequence, chunk in zip(found, chunks, strict=True):
        sequence.take(chunk, result)
    for sequence in expected[:2]:
        sequence.step(alone)
        sequence.step(alone)
    expected[2].step(alone, stop=9)
    expected[3].step(alone)
    assert [(each.output, each.drafts) for each in found] == [(each.output, each.drafts) for each in expected]
    assert len(found[0].drafts) < len(found[1].drafts) == len(found[3].drafts) == 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The first guesses of a sequence, and its first tokens."""

    drafts: tuple[int, ...]
    output: list[int]


def begin(engine: DraftingEngine, prompt: list[int], *, num_computed: int = 0, carry_slot: int | None = None) -> Begun:
    answer = Generating(
        prompt=prompt, page_indices=PAGES, sampling=SEEDED, num_computed=num_computed, carry_slot=carry_slot
    )
    answer.step(engine)
    drafts = answer.drafts
    return Begun(drafts=drafts, output=answer.generate(engine, 12))


def handed_over(spec: EngineSpec, prompt: list[int]) -> DraftingEngine:
    """A decode worker's, after the handoff of all but the last token, with the tail in slot 2. In slot 3 there is one
    of another prompt."""
    source, target = DraftingEngine(spec), DraftingEngine(spec)
    source_pages = (1, 30, 4, 8)
    sequence = Generating(prompt=prompt, page_indices=source_pages)
    sequence.step(source, stop=2)
    source.run(sequence.chunk(len(prompt) - 1, tail_slot=1))
    hand_over(source, target, pages=list(zip(source_pages, PAGES, strict=False)), tail_slots=(1, 2))
    other = Generating(sequence_id=SequenceId(8), prompt=random_tokens(50, 6), page_indices=(31,))
    target.run(other.chunk(6, tail_slot=3))
    return target


@pytest.mark.parametrize("num_prompt_tokens", [4, 2 * PAGE_SLOTS + 1, 29])
@pytest.mark.parametrize("name", ["itself", *DRAFTERS])
def test_guesses_after_a_handoff_equal_those_after_a_local_prefill(
    name: str, num_prompt_tokens: int, specs: dict[str, EngineSpec]
) -> None:
    prompt = PROMPT[:num_prompt_tokens]
    local, decode = DraftingEngine(specs[name]), handed_over(specs[name], prompt)
    expected = begin(local, prompt)
    assert begin(decode, prompt, num_computed=num_prompt_tokens - 1, carry_slot=2) == expected
    assert len(expected.drafts) == 4
    assert_same_cache(name, decode, local, num_slots=num_prompt_tokens)


@pytest.mark.parametrize("name", HEADS)
def test_guesses_of_a_head_from_a_stale_tail_are_others(name: str, specs: dict[str, EngineSpec]) -> None:
    """So the comparison above would show it; and the answer is the same for all that."""
    prompt = PROMPT[:4]
    expected = begin(DraftingEngine(specs[name]), prompt)
    found = begin(handed_over(specs[name], prompt), prompt, num_computed=3, carry_slot=3)
    assert found.drafts != expected.drafts
    assert found.output == expected.output


@pytest.mark.parametrize("num_prompt_tokens", [PAGE_SLOTS + 1, 29])
@pytest.mark.parametrize("name", ["itself", *DRAFTERS])
def test_guesses_of_a_forked_sequence_equal_those_of_one_that_computed_its_prompt(
    name: str, num_prompt_tokens: int, specs: dict[str, EngineSpec]
) -> None:
    """It shares full pages, has a copy of the last one if that is partial, and computes the prompt's last token."""
    engine, prompt = DraftingEngine(specs[name]), PROMPT[:num_prompt_tokens]
    Generating(prompt=prompt, page_indices=PAGES).step(engine)
    num_full, num_partial = divmod(num_prompt_tokens - 1, PAGE_SLOTS)
    child_pages = (*PAGES[:num_full], 12, 13)
    child = Generating(
        sequence_id=SequenceId(2),
        prompt=prompt,
        page_indices=child_pages,
        sampling=SEEDED,
        num_computed=num_prompt_tokens - 1,
    )
    chunk = child.chunk()
    copies = [PageCopy(source=PAGES[num_full], target=12)] if num_partial else []
    result = engine.run(chunk, new_sequences=[child.announcement()], copies=copies)
    child.take(chunk, result)
    expected = Generating(prompt=prompt, page_indices=PAGES, sampling=SEEDED)
    expected.step(DraftingEngine(specs[name]))
    assert (child.output, child.drafts) == (expected.output, expected.drafts)


def test_id_that_comes_again_is_another_sequence(specs: dict[str, EngineSpec]) -> None:
    """It begins where the draft model had read ahead for the one before, in other pages."""
    engine = DraftingEngine(specs["itself"])
    Generating(prompt=PROMPT[:-1], page_indices=PAGES).step(engine)
    again = Generating(prompt=PROMPT, page_indices=(16, 17, 18, 19, 20), num_computed=len(PROMPT) - 1)
    chunk = again.chunk()
    result = engine.run(
        chunk,
        ended_sequences=[again.sequence_id],
        new_sequences=[again.announcement()],
        copies=[PageCopy(source=PAGES[index], target=again.page_indices[index]) for index in range(4)],
    )
    again.take(chunk, result)
    expected = Generating(prompt=PROMPT, page_indices=PAGES)
    expected.step(DraftingEngine(specs["itself"]))
    assert (again.output, again.drafts) == (expected.output, expected.drafts)


@pytest.mark.parametrize(
    ("name", "num_tokens", "num_guesses"),
    [
        ("itself", 12, 4),
        ("itself", 13, 3),
        ("itself", 15, 1),
        ("itself", 16, 0),
        ("eagle", 13, 4),
        ("eagle", 14, 3),
        ("eagle", 16, 1),
    ],
)
def test_guesses_end_where_the_pages_do(
    name: str, num_tokens: int, num_guesses: int, specs: dict[str, EngineSpec]
) -> None:
    """Of 16 slots. A head caches a token one slot before its position."""
    answer = Generating(prompt=random_tokens(4, num_tokens), page_indices=(6, 1))
    engine = DraftingEngine(specs[name])
    answer.step(engine)
    assert len(answer.drafts) == num_guesses
    others = [page for page in range(NUM_PAGES) if page not in (6, 1)]
    assert not engine.draft_kv[:, others].any()


@pytest.mark.parametrize("name", ["itself", "eagle"])
def test_guesses_end_where_the_context_does(name: str, specs: dict[str, EngineSpec]) -> None:
    """The last position is 255."""
    engine = DraftingEngine(specs[name])
    for num_tokens, num_guesses in [(250, 4), (253, 2), (254, 1), (255, 0), (256, 0)]:
        answer = Generating(
            sequence_id=SequenceId(num_tokens),
            prompt=random_tokens(4, num_tokens),
            page_indices=tuple(range(NUM_PAGES)),
        )
        answer.step(engine)
        assert len(answer.drafts) == num_guesses


@pytest.mark.parametrize("name", ["itself", *DRAFTERS])
def test_layers_of_a_drafter_tick_once_a_pass_after_those_of_the_model(name: str, specs: dict[str, EngineSpec]) -> None:
    """In a pass without a pair for a head too, and with guesses."""
    engine = DraftingEngine(specs[name])
    num_draft_layers = NUM_LAYERS if name in ("itself", "draft") else 1
    assert engine.info.num_counted_layers == NUM_LAYERS + num_draft_layers
    answer = Generating(prompt=PROMPT, page_indices=PAGES)
    for num_passes, stop in enumerate((1, 20, None, None), start=1):
        answer.step(engine, stop=stop)
        assert engine.num_ticks == num_passes * (NUM_LAYERS + num_draft_layers + 1)


def test_head_refuses_a_chunk_that_does_not_follow(specs: dict[str, EngineSpec]) -> None:
    engine = DraftingEngine(specs["eagle"])
    sequence = Generating(prompt=PROMPT, page_indices=PAGES)
    sequence.step(engine, stop=10)
    sequence.num_computed = 12
    with pytest.raises(InternalError, match="sequence 1 came to the draft head at token 12, where token 10 was due"):
        sequence.step(engine)


@pytest.mark.parametrize("name", ["itself", "eagle"])
def test_sequence_that_was_preempted_is_guessed_like_a_new_one(name: str, specs: dict[str, EngineSpec]) -> None:
    """It has other pages now, and another sequence has those that it had."""
    engine = DraftingEngine(specs[name])
    answer = Generating(prompt=PROMPT, page_indices=PAGES, sampling=SEEDED)
    answer.generate(engine, 6)
    other = Generating(sequence_id=SequenceId(9), prompt=random_tokens(77, 50), page_indices=PAGES)
    again = Generating(prompt=PROMPT, page_indices=tuple(range(12, 20)), sampling=SEEDED, output=list(answer.output))
    expected = Generating(prompt=PROMPT, page_indices=PAGES, sampling=SEEDED, output=list(answer.output))
    chunk, new_sequences = again.chunk(), [again.announcement(), other.announcement()]
    result = engine.run(other.chunk(), chunk, new_sequences=new_sequences, ended_sequences=[answer.sequence_id])
    again.take(chunk, result)
    expected_chunk = expected.chunk()
    expected.take(
        expected_chunk, DraftingEngine(specs[name]).run(expected_chunk, new_sequences=[expected.announcement()])
    )
    assert (again.output, again.drafts) == (expected.output, expected.drafts)

"""Answers that must match a grammar, by a tokenizer of bytes and a model that wants something else every time."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from llguidance import LLMatcher
from tests.pure.sampling_cases import logits_of, new_sequence, params
from tests.pure.test_text_tokens import END_ID, byte_level_tokenizer, special_token

from pdserve.engine.grammar import Grammars
from pdserve.engine.pass_rows import place_chunks, sampling_levels
from pdserve.engine.sampler import Sampler
from pdserve.engine.verification import verify
from pdserve.errors import InternalError
from pdserve.ids import SequenceId
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import Chunk, NewSequence
from pdserve.text.tokenizer import Tokenizer

OTHER_END_ID = END_ID + 1
VOCAB_SIZE = END_ID + 30
"""Padded: the model has logits for tokens that there are not."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["hell", "é"]}, "size": {"type": "integer", "minimum": 0, "maximum": 500}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
DOCUMENT = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
DIGITS = LLMatcher.grammar_from_regex("[0-9]{2,4}")
BROKEN = "start: %%%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    dir: Path
    grammars: Grammars
    tokenizer: Tokenizer

    def sampler_of(self, *news: NewSequence) -> Sampler:
        sampler = Sampler(vocab_size=VOCAB_SIZE, grammars=self.grammars)
        for new in news:
            sampler.add(new)
        return sampler

    def answer(self, sampling: SamplingParams, output: Sequence[int] = ()) -> list[int]:
        """All tokens, after some that were sampled before."""
        sampler = self.sampler_of(new_sequence(1, sampling, output=tuple(output)))
        generated = list(output)
        while not sampler.has_ended(SequenceId(1)):
            generated += sampler.sample(logits_after(generated, sampling), [SequenceId(1)])
        return generated

    def text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    model_dir = tmp_path_factory.mktemp("bytes")
    tokenizer = byte_level_tokenizer()
    tokenizer["added_tokens"].append(special_token(OTHER_END_ID, "<other-end>"))
    (model_dir / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_ID, OTHER_END_ID]}))
    grammars = Grammars(model_dir, vocab_size=VOCAB_SIZE)
    return Model(dir=model_dir, grammars=grammars, tokenizer=Tokenizer.load(model_dir))


def ending(grammar: str, *, seed: int = 0, min_tokens: int = 0, max_tokens: int = 100) -> SamplingParams:
    return params(
        grammar=grammar,
        seed=seed,
        stop_token_ids=(END_ID, OTHER_END_ID),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        temperature=2.0,
    )


def logits_after(tokens: Sequence[int], sampling: SamplingParams) -> torch.Tensor:
    return logits_of(hash((sampling.seed, *tokens)) % 2**32, vocab_size=VOCAB_SIZE)


def test_answers_by_a_schema_are_whole_documents_and_end(model: Model) -> None:
    documents: list[str] = []
    for seed in range(30):
        *token_ids, last = model.answer(ending(DOCUMENT, seed=seed))
        assert last in (END_ID, OTHER_END_ID)
        documents.append(model.text(token_ids))
    for document in documents:
        content = json.loads(document)
        assert set(content) == {"name", "size"} and content["name"] in ("hell", "é") and 0 <= content["size"] <= 500
    assert len(set(documents)) > 10


def test_complete_answer_may_only_end_and_by_any_end_of_sequence(model: Model) -> None:
    """Whatever the model thinks of it, and with no bias strong enough to go on."""
    fixed = LLMatcher.grammar_from_regex("ab")
    lasts = {model.answer(ending(fixed, seed=seed))[-1] for seed in range(20)}
    assert lasts == {END_ID, OTHER_END_ID}
    biased = params(grammar=fixed, temperature=0, logit_bias={ord("a"): 100.0}, stop_token_ids=(END_ID, OTHER_END_ID))
    assert model.text(model.answer(biased)) == "ab"


def test_answer_resumed_after_preemption_equals_the_uninterrupted_one(model: Model) -> None:
    sampling = ending(DOCUMENT, seed=3)
    whole = model.answer(sampling)
    for num_before in (1, len(whole) // 2, len(whole) - 1):
        assert model.answer(sampling, whole[:num_before]) == whole


def test_rows_without_a_grammar_sample_as_they_do_alone(model: Model) -> None:
    free, guided = params(seed=1), ending(DIGITS, seed=2)
    alone = model.sampler_of(new_sequence(1, free))
    mixed = model.sampler_of(new_sequence(1, free), new_sequence(2, guided), new_sequence(3, ending(DOCUMENT)))
    for step in range(5):
        logits_RV = logits_of(step, num_rows=3, vocab_size=VOCAB_SIZE)
        expected = alone.sample(logits_RV[1:2].clone(), [SequenceId(1)])
        assert mixed.sample(logits_RV, [SequenceId(2), SequenceId(1), SequenceId(3)])[1:2] == expected


def test_min_tokens_lengthens_what_the_grammar_lets_grow_and_else_fills_up_with_ends(model: Model) -> None:
    for seed in range(10):
        token_ids = model.answer(ending(DIGITS, seed=seed, min_tokens=4))
        assert len(model.text(token_ids[:4])) == 4 and token_ids[4] in (END_ID, OTHER_END_ID) and len(token_ids) == 5
        token_ids = model.answer(ending(DIGITS, seed=seed, min_tokens=7))
        assert len(model.text(token_ids)) == 4 and set(token_ids[4:]) <= {END_ID, OTHER_END_ID} and len(token_ids) == 8


def test_answer_that_ignores_its_end_fills_up_with_ends(model: Model) -> None:
    token_ids = model.answer(params(grammar=DIGITS, max_tokens=9))
    digits = model.text(token_ids)
    assert digits.isdigit() and 2 <= len(digits) <= 4
    assert len(token_ids) == 9 and set(token_ids[len(digits) :]) <= {END_ID, OTHER_END_ID}


def test_grammar_that_cannot_be_compiled_ends_its_own_answer_alone(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = model.sampler_of(new_sequence(1, ending(BROKEN)), new_sequence(2, ending(DIGITS)))
    with caplog.at_level(logging.WARNING):
        broken, digit = sampler.sample(logits_of(1, num_rows=2, vocab_size=VOCAB_SIZE), [SequenceId(1), SequenceId(2)])
    assert broken in (END_ID, OTHER_END_ID) and sampler.has_ended(SequenceId(1))
    assert chr(digit).isdigit()
    assert [record.message.split()[0] for record in caplog.records] == ["grammar_failed"]


def test_output_that_does_not_match_the_grammar_ends_the_answer(model: Model) -> None:
    token_ids = model.answer(ending(DIGITS), output=[ord("x")])
    assert len(token_ids) == 2 and token_ids[1] in (END_ID, OTHER_END_ID)


def test_drafts_are_kept_as_far_as_the_grammar_lets_them(model: Model) -> None:
    sampling = ending(DOCUMENT, seed=5)
    whole = model.answer(sampling)
    sampler = model.sampler_of(new_sequence(1, sampling))
    drafts = (*whole[:6], ord("x"), *whole[7:9])
    chunk = Chunk(
        sequence_id=SequenceId(1), start=0, token_ids=(1, *drafts), page_indices=(0,), samples=True, num_drafts=9
    )
    levels = sampling_levels(place_chunks([chunk]))
    logits_RV = torch.cat([logits_after(drafts[:level], sampling) for level in range(10)])
    (verified,) = verify(levels, logits_RV, sampler)
    assert verified.token_ids == whole[:7]
    assert sampler.sample(logits_after(whole[:7], sampling), [SequenceId(1)]) == whole[7:8]


def test_proposal_of_the_next_token_keeps_to_the_grammar(model: Model) -> None:
    sampler = model.sampler_of(new_sequence(1, ending(DIGITS, seed=8)))
    proposed = sampler.propose(logits_of(3, vocab_size=VOCAB_SIZE), [SequenceId(1)], 1)
    assert sampler.sample(logits_of(3, vocab_size=VOCAB_SIZE), [SequenceId(1)]) == proposed


def test_tokenizer_may_know_an_end_of_sequence_that_the_model_does_not(model: Model) -> None:
    sampler = Sampler(vocab_size=OTHER_END_ID, grammars=Grammars(model.dir, vocab_size=OTHER_END_ID))
    sampler.add(new_sequence(1, ending(LLMatcher.grammar_from_regex("a"))))
    drawn = [sampler.sample(logits_of(step, vocab_size=OTHER_END_ID), [SequenceId(1)]) for step in range(2)]
    assert drawn == [[ord("a")], [END_ID]]


def test_forgotten_sequence_does_not_wait_for_its_grammar(model: Model) -> None:
    sampler = model.sampler_of(new_sequence(1, ending(DOCUMENT)))
    sampler.forget([SequenceId(1)])
    assert not sampler.knows(SequenceId(1))


def test_grammar_for_a_sampler_without_grammars_is_refused() -> None:
    with pytest.raises(InternalError, match="sequence 1 has a grammar"):
        Sampler(vocab_size=VOCAB_SIZE).add(new_sequence(1, ending(DIGITS)))

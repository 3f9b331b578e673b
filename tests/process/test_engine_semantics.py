"""The default model in a rank process: guesses and grammars on natural text."""

import json
from collections.abc import Sequence

from llguidance import LLMatcher
from msgspec.structs import replace
from tests.pure.drafting_engine import GREEDY, NUM_PAGES, SEEDED, Generating, spec_of

from pdserve.engine.client import RankEngine, start_engine
from pdserve.ids import SequenceId
from pdserve.model.source import ModelSource
from pdserve.sampling import SamplingParams
from pdserve.schedule.batch import Batch
from pdserve.text.tokenizer import Tokenizer

NUM_TOKENS = 24
SCHEMA = {
    "type": "object",
    "properties": {"animal": {"type": "string", "maxLength": 12}, "legs": {"type": "integer", "maximum": 99}},
    "required": ["animal", "legs"],
    "additionalProperties": False,
}


class Passes:
    """Sequences on one engine, one after another."""

    def __init__(self, engine: RankEngine) -> None:
        self._engine = engine
        self.num_passes = 0

    async def generate(self, prompt: Sequence[int], sampling: SamplingParams, guessed: Sequence[int] = ()) -> list[int]:
        """A whole answer, with four guesses a pass out of one that somebody guessed."""
        answer = Generating(
            sequence_id=SequenceId(self.num_passes),
            prompt=prompt,
            page_indices=tuple(range(NUM_PAGES)),
            sampling=sampling,
        )
        while len(answer.output) < sampling.max_tokens and not set(answer.output) & set(sampling.stop_token_ids):
            answer.drafts = tuple(guessed[len(answer.output) :][:4])
            chunk = answer.chunk()
            news = () if answer.output else (answer.announcement(),)
            batch = Batch(pass_index=self.num_passes, chunks=(chunk,), new_sequences=news)
            answer.take(chunk, await self._engine.run(batch))
            self.num_passes += 1
        return answer.output


async def test_guesses_change_no_text_and_documents_match_their_schema(model: ModelSource, text_ids: list[int]) -> None:
    tokenizer = Tokenizer.load(model.dir)
    engine = await start_engine(spec_of(model.dir))
    try:
        passes = Passes(engine)
        for sampling in (GREEDY, replace(SEEDED, repetition_penalty=1.1, num_top_logprobs=1)):
            sampling = replace(sampling, max_tokens=NUM_TOKENS)
            plain = await passes.generate(text_ids[:60], sampling)
            num_passes_before = passes.num_passes
            half_right = [0 if place % 7 == 6 else token_id for place, token_id in enumerate(plain)]
            assert await passes.generate(text_ids[:60], sampling, guessed=half_right) == plain
            assert passes.num_passes - num_passes_before < NUM_TOKENS / 2
        prompt = tokenizer.encode("An animal with the number of its legs, as JSON:\n")
        guided = replace(
            SEEDED,
            grammar=LLMatcher.grammar_from_json_schema(SCHEMA),
            stop_token_ids=tuple(tokenizer.eos_token_ids),
        )
        tokens = await passes.generate(prompt, guided)
        document = json.loads(tokenizer.decode(tokens))
        assert set(document) == {"animal", "legs"} and document["legs"] <= 99
        assert await passes.generate(prompt, guided, guessed=[0, *tokens[1:]]) == tokens
    finally:
        await engine.close()

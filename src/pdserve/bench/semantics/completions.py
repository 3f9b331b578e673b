"""Cases of `POST /v1/completions`."""

from dataclasses import dataclass
from typing import Any

from pdserve.bench.semantics.case import NUM_TOKENS, Case, Check
from pdserve.bench.semantics.checks import (
    all_of,
    ends_by,
    has_logprobs_of_each_token,
    num_choices_is,
    num_tokens_is,
    text_is,
    text_is_json,
    text_lacks,
    text_matches,
)
from pdserve.text.tokenizer import Tokenizer

PATH = "/v1/completions"

PERSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_sailor": {"type": "boolean"},
    },
    "required": ["name", "age", "is_sailor"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Natural prompts, and the tokens that some cases name."""

    short: str
    """One sentence."""
    medium: str
    """A paragraph."""
    long: str
    """Several chunks of prefill."""
    short_ids: tuple[int, ...]
    eos_id: int
    word_id: int
    """The token of ' the'."""

    @classmethod
    def of(cls, natural_text: str, tokenizer: Tokenizer) -> "Texts":
        paragraphs = natural_text.split("\n\n")
        short = paragraphs[0].replace("\n", " ").split(". ")[0] + "."
        return cls(
            short=short,
            medium=paragraphs[1],
            long="\n\n".join(paragraphs[:3]),
            short_ids=tuple(tokenizer.encode(short)),
            eos_id=min(tokenizer.eos_token_ids),
            word_id=tokenizer.encode(" the", add_special_tokens=False)[0],
        )


def completion_cases(texts: Texts) -> list[Case]:
    return [
        *_sampling(texts),
        *_endings(texts),
        *_prompts(texts),
        *_choices(texts),
        *_logprobs(texts),
        *_schemas(),
        *_guided(),
    ]


def _case(name: str, prompt: Any, check: Check | None = None, **fields: Any) -> Case:
    body = {"model": "default", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, **fields}
    return Case(name=f"completion: {name}", path=PATH, body=body, check=check)


def _sampling(texts: Texts) -> list[Case]:
    short, medium = texts.short, texts.medium
    return [
        _case("greedy", medium, num_tokens_is(NUM_TOKENS)),
        _case("seed", short, temperature=0.9, seed=7),
        _case("large and negative seeds", short, temperature=0.9, seed=-(2**62)),
        _case("top_p", short, temperature=1.1, seed=8, top_p=0.6),
        _case("top_k", short, temperature=1.1, seed=9, top_k=20),
        _case("min_p", short, temperature=1.2, seed=10, min_p=0.1),
        _case("all filters", medium, temperature=1.2, seed=11, top_p=0.9, top_k=50, min_p=0.02),
        _case("presence and frequency penalties", medium, presence_penalty=1.0, frequency_penalty=0.8, max_tokens=24),
        _case("repetition penalty", medium, repetition_penalty=1.3, max_tokens=24),
        _case("all penalties, seed", medium, temperature=0.8, seed=12, presence_penalty=0.5, repetition_penalty=1.1),
        _case("logit_bias against a word", short, text_lacks(" the "), logit_bias={str(texts.word_id): -100}),
        _case("logit_bias for a word", short, text_is(" the" * 4), logit_bias={str(texts.word_id): 100}, max_tokens=4),
    ]


def _endings(texts: Texts) -> list[Case]:
    short, eos = texts.short, {str(texts.eos_id): 100}
    return [
        _case("one token", short, all_of(num_tokens_is(1), ends_by("length")), max_tokens=1),
        _case("end of sequence first", short, all_of(num_tokens_is(1), text_is(""), ends_by("stop")), logit_bias=eos),
        _case("min_tokens before it", short, all_of(num_tokens_is(5), ends_by("stop")), logit_bias=eos, min_tokens=4),
        _case(
            "ignore_eos",
            short,
            all_of(num_tokens_is(6), ends_by("length")),
            logit_bias=eos,
            ignore_eos=True,
            max_tokens=6,
        ),
        _case("stop string", texts.medium, all_of(text_lacks("a"), ends_by("stop")), stop="a", max_tokens=64),
        _case("stop string in the first token", short, all_of(num_tokens_is(1), text_is("")), stop=[" ", "\n"]),
        _case(
            "four stop strings", short, text_lacks("zq", "zx", "r", "jj"), stop=["zq", "zx", "r", "jj"], max_tokens=48
        ),
        _case(
            "stop_token_ids first",
            short,
            all_of(num_tokens_is(1), ends_by("stop")),
            logit_bias={str(texts.word_id): 100},
            stop_token_ids=[texts.word_id],
        ),
        _case("min_tokens, then stop", short, logit_bias={str(texts.word_id): 100}, stop=" the", min_tokens=3),
    ]


def _prompts(texts: Texts) -> list[Case]:
    ids = list(texts.short_ids)
    return [
        _case("one token of prompt", ids[:1], num_tokens_is(NUM_TOKENS)),
        _case("two tokens of prompt", ids[:2]),
        _case("token ids", ids),
        _case("a list of one", [texts.short]),
        _case("several texts", [texts.short, texts.medium, "Once"], num_choices_is(3, num_distinct=3)),
        _case("several lists of token ids", [ids, ids[:5]], num_choices_is(2)),
        _case("long", texts.long, num_tokens_is(24), max_tokens=24),
        _case("emoji and accents", "Une journée d'été à Malmö 🦭🌊, 日本語 et", temperature=0.9, seed=3, max_tokens=24),
        _case("broken characters never", "🦭🦭🦭🦭🦭🦭🦭🦭", text_lacks("\ufffd"), max_tokens=3, return_token_ids=True),
        _case("return_token_ids", texts.short, return_token_ids=True),
        _case("echo", texts.short, text_matches(".*lies where the river meets the sea.*"), echo=True),
        _case("echo, several prompts and choices", [texts.short, "Once"], num_choices_is(4), echo=True, n=2, seed=3),
        _case(
            "special tokens as text",
            texts.short,
            logit_bias={str(texts.eos_id): 100},
            ignore_eos=True,
            skip_special_tokens=False,
            max_tokens=3,
        ),
        _case("user and no-ops", texts.short, user="somebody", n=1, best_of=1, echo=False),
    ]


def _choices(texts: Texts) -> list[Case]:
    return [
        _case("n=3", texts.medium, num_choices_is(3, num_distinct=2), n=3, temperature=1.0, seed=21),
        _case(
            "n=3 of one token of prompt", list(texts.short_ids[:1]), num_choices_is(3), n=3, temperature=1.0, seed=22
        ),
        _case("n=2, greedy", texts.short, num_choices_is(2), n=2),
        _case("n=3, one token each", texts.medium, num_tokens_is(3), n=3, temperature=1.0, seed=23, max_tokens=1),
        _case("n=2 of two prompts", [texts.short, texts.medium], num_choices_is(4), n=2, temperature=1.0, seed=24),
        _case(
            "n=3, stops and penalties",
            texts.medium,
            num_choices_is(3),
            n=3,
            temperature=1.0,
            seed=25,
            stop=["."],
            frequency_penalty=0.4,
            max_tokens=32,
        ),
        _case("n=2, long", texts.long, num_choices_is(2), n=2, temperature=1.0, seed=26),
    ]


def best_of_cases(texts: Texts) -> list[Case]:
    """They can't be streamed."""
    return [
        _case("best_of", texts.medium, num_choices_is(1), best_of=3, temperature=1.0, seed=31),
        _case("best_of, n", texts.medium, num_choices_is(2), best_of=4, n=2, temperature=1.0, seed=32, logprobs=1),
        _case("prompt_logprobs", texts.medium, prompt_logprobs=2),
    ]


def _logprobs(texts: Texts) -> list[Case]:
    return [
        _case("logprobs=0", texts.short, logprobs=0, return_token_ids=True),
        _case("logprobs=5", texts.short, has_logprobs_of_each_token(num_top=5), logprobs=5, return_token_ids=True),
        _case("logprobs, stop", texts.medium, logprobs=2, stop=" of", max_tokens=48),
        _case("logprobs, n, seed", texts.medium, num_choices_is(2), logprobs=3, n=2, temperature=1.0, seed=41),
        _case("logprobs, echo", texts.short, logprobs=1, echo=True),
        _case("logprobs, emoji", "🦭🌊🦭🌊🦭", logprobs=1, max_tokens=8),
    ]


def _schemas() -> list[Case]:
    prompt = "A sailor, as JSON: "
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON_SCHEMA}}
    keys = ("name", "age", "is_sailor")
    return [
        _case(
            "json_schema", prompt, all_of(text_is_json(keys), ends_by("stop")), response_format=schema, max_tokens=64
        ),
        _case(
            "json_schema, seed, n",
            prompt,
            text_is_json(keys),
            response_format=schema,
            max_tokens=64,
            n=3,
            temperature=1.0,
            seed=51,
        ),
        _case("guided_json", prompt, text_is_json(keys), guided_json=PERSON_SCHEMA, max_tokens=64),
    ]


def _guided() -> list[Case]:
    return [
        _case("guided_regex", "The year was ", text_matches("(18|19)[0-9]{2}"), guided_regex="(18|19)[0-9]{2}"),
        _case("guided_choice", "The sea is ", text_matches("calm|rough"), guided_choice=["calm", "rough"]),
        _case(
            "guided_grammar",
            "1 + 1 = ",
            text_matches(r"[0-9]+( \+ [0-9]+)?"),
            guided_grammar='start: NUM (" + " NUM)?\nNUM: /[0-9]{1,3}/',
        ),
        _case(
            "structured_outputs",
            "The sea is ",
            text_matches("calm|rough"),
            structured_outputs={"choice": ["calm", "rough"]},
            temperature=1.0,
            seed=52,
        ),
        _case(
            "guided_regex, logprobs, penalty",
            "Call ",
            text_matches("[0-9]{3}-[0-9]{4}"),
            logprobs=1,
            guided_regex="[0-9]{3}-[0-9]{4}",
            frequency_penalty=0.5,
        ),
    ]

"""The load of a soak: kinds of requests, how often each comes, and how its client behaves."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

from pdserve.bench.semantics.case import Case
from pdserve.bench.semantics.chats import PATH as CHATS
from pdserve.bench.semantics.completions import PATH as COMPLETIONS
from pdserve.bench.semantics.completions import PERSON_SCHEMA, Texts
from pdserve.bench.semantics.refusals import refusal_cases

NUM_TOKENS = 24

_QUESTIONS = (
    "Why is the sea salty? Answer in one sentence.",
    "Name three things that a sailor needs.",
    "Say good morning to a lighthouse keeper.",
    "What does a harbour smell of?",
)


class Manner(Enum):
    """Of a client."""

    READS = "reads"
    LEAVES = "leaves"
    """It disconnects at some moment, unless the answer is there before."""
    READS_SLOWLY = "reads slowly"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadKind:
    name: str
    weight: int
    """Its share of the requests, as compared with the others'."""
    cases: tuple[Case, ...]
    manner: Manner = Manner.READS


def load_mix(texts: Texts) -> tuple[LoadKind, ...]:
    """Every case is greedy or seeded, so that its answer is one alone."""
    chats = [_chat(question, stream=True) for question in _QUESTIONS]
    long = [_completion(f"long prompt {start}", texts.long[start:], stream=start > 0) for start in (0, 400)]
    choices = [_completion(f"n={n}", texts.medium, n=n, temperature=1.0, seed=n, stream=n == 3) for n in (2, 3)]
    return (
        LoadKind(name="short chat, streamed", weight=30, cases=tuple(chats)),
        LoadKind(name="long prompt", weight=14, cases=tuple(long)),
        LoadKind(name="several choices", weight=10, cases=tuple(choices)),
        LoadKind(name="structured output", weight=10, cases=_structured()),
        LoadKind(name="stop string", weight=8, cases=_stopped(texts)),
        LoadKind(name="prompt logprobs", weight=5, cases=_scored(texts)),
        LoadKind(name="client leaves", weight=12, cases=(*chats, *long, *choices), manner=Manner.LEAVES),
        LoadKind(name="slow reader", weight=5, cases=_verbose(texts), manner=Manner.READS_SLOWLY),
        LoadKind(name="refused", weight=6, cases=tuple(refusal_cases())),
    )


def cases_of(mix: Sequence[LoadKind]) -> list[Case]:
    """Each once."""
    return list({case.name: case for kind in mix for case in kind.cases}.values())


def draw(mix: Sequence[LoadKind], random: Random) -> tuple[LoadKind, Case]:
    (kind,) = random.choices(mix, weights=[kind.weight for kind in mix])
    return kind, random.choice(kind.cases)


def _structured() -> tuple[Case, ...]:
    response_format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON_SCHEMA}}
    return (
        _chat("Describe a sailor.", response_format=response_format, max_tokens=48),
        _completion("a choice", "The boat is", guided_choice=["calm", "sinking", "at sea"], stream=True),
        _completion("a pattern", "Call", guided_regex="[0-9]{3}-[0-9]{4}"),
    )


def _stopped(texts: Texts) -> tuple[Case, ...]:
    return (
        _completion("stop strings", texts.medium, stop=["zq", "r", "jj"], max_tokens=48),
        _completion("stop string, streamed", texts.short, stop="e", stream=True, max_tokens=48),
    )


def _scored(texts: Texts) -> tuple[Case, ...]:
    return (
        _completion("prompt logprobs", texts.medium, prompt_logprobs=3, max_tokens=4),
        _completion("prompt logprobs, echo", texts.short, echo=True, logprobs=2, max_tokens=0),
    )


def _verbose(texts: Texts) -> tuple[Case, ...]:
    """Some hundred bytes a token."""
    return (_completion("logprobs, streamed", texts.short, logprobs=5, n=2, seed=5, temperature=0.8, stream=True),)


def _completion(name: str, prompt: str, **fields: Any) -> Case:
    body = {"model": "default", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, **fields}
    return Case(name=f"completion: {name}", path=COMPLETIONS, body=body)


def _chat(question: str, **fields: Any) -> Case:
    messages = [{"role": "user", "content": question}]
    body = {"model": "default", "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, **fields}
    return Case(name=f"chat: {question}", path=CHATS, body=body)

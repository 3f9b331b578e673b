"""What an answer must show, as small functions that are put together."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.bench.semantics.case import Check, Json


def all_of(*checks: Check) -> Check:
    def check(answer: Json) -> str | None:
        return next((problem for each in checks if (problem := each(answer)) is not None), None)

    return check


def text_of(choice: Json) -> str:
    return choice["text"] if "text" in choice else choice.get("message", {}).get("content") or ""


def num_tokens_is(num_tokens: int) -> Check:
    """Of all choices together."""

    def check(answer: Json) -> str | None:
        found = answer["usage"]["completion_tokens"] if answer.get("usage") else None
        return None if found in (None, num_tokens) else f"{found} completion tokens instead of {num_tokens}"

    return check


def ends_by(*reasons: str) -> Check:
    """The finish reasons of the choices, in order."""

    def check(answer: Json) -> str | None:
        found = tuple(choice["finish_reason"] for choice in answer["choices"])
        return None if found == reasons else f"finish reasons {found} instead of {reasons}"

    return check


def num_choices_is(num_choices: int, *, num_distinct: int = 1) -> Check:
    """With indices from 0, and at least so many different texts."""

    def check(answer: Json) -> str | None:
        indices = [choice["index"] for choice in answer["choices"]]
        if indices != list(range(num_choices)):
            return f"choices {indices} instead of {num_choices}"
        num_texts = len({text_of(choice) for choice in answer["choices"]})
        return None if num_texts >= num_distinct else f"{num_texts} different texts, not {num_distinct}"

    return check


def text_is(text: str) -> Check:
    return _each_text(lambda found: None if found == text else f"{found!r} instead of {text!r}")


def text_matches(pattern: str) -> Check:
    compiled = re.compile(pattern, re.DOTALL)
    return _each_text(lambda found: None if compiled.fullmatch(found) else f"{found!r} does not match {pattern!r}")


def text_lacks(*parts: str) -> Check:
    return _each_text(lambda found: next((f"{found!r} has {part!r}" for part in parts if part in found), None))


def text_is_json(required: Sequence[str] = ()) -> Check:
    """An object with these keys."""

    def problem(found: str) -> str | None:
        try:
            document: Any = json.loads(found)
        except ValueError as error:
            return f"{found!r} is no JSON: {error}"
        missing = [key for key in required if not isinstance(document, dict) or key not in document]
        return f"{found!r} lacks {missing}" if missing else None

    return _each_text(problem)


def has_logprobs_of_each_token(*, num_top: int) -> Check:
    """Of chats and completions alike: one entry a token, none above 0, so many alternatives in each."""

    def check(answer: Json) -> str | None:
        for choice in answer["choices"]:
            logprobs = choice["logprobs"]
            if "content" in logprobs:
                values = [entry["logprob"] for entry in logprobs["content"]]
                nums_top = {len(entry["top_logprobs"]) for entry in logprobs["content"]}
            else:
                values = [value for value in logprobs["token_logprobs"] if value is not None]
                nums_top = {min(len(top), num_top) for top in logprobs["top_logprobs"] if top is not None}
            if not values or max(values) > 0 or nums_top != {num_top}:
                return f"logprobs {values} with {nums_top} alternatives"
            if "token_ids" in choice and len(choice["token_ids"]) != len(values):
                return f"{len(values)} logprobs of {len(choice['token_ids'])} tokens"
        return None

    return check


def calls_tool(*names: str) -> Check:
    """Every choice calls one of them, with a JSON object as arguments."""

    def check(answer: Json) -> str | None:
        for choice in answer["choices"]:
            calls: list[Json] = choice["message"].get("tool_calls") or []
            if not calls or choice["finish_reason"] != "tool_calls":
                return f"no tool call: {choice}"
            for call in calls:
                if call["function"]["name"] not in names:
                    return f"{call['function']['name']!r} was called"
                if not isinstance(json.loads(call["function"]["arguments"]), dict):
                    return f"arguments {call['function']['arguments']!r}"
        return None

    return check


def _each_text(problem_of: Callable[[str], str | None]) -> Check:
    def check(answer: Json) -> str | None:
        return next(
            (problem for choice in answer["choices"] if (problem := problem_of(text_of(choice))) is not None), None
        )

    return check

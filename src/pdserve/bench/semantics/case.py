"""One request of the battery, and what its answer must show beside being the same everywhere."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Json = dict[str, Any]

NUM_TOKENS = 10
"""Of an answer, where a case does not need more."""

Check = Callable[[Json], str | None]
"""What is wrong with a whole answer, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Every case is greedy or seeded, so its answer is one alone."""

    name: str
    path: str
    body: Json | bytes | None
    """Bytes are sent as they are; None: a GET."""
    status: int = 200
    check: Check | None = None
    error_param: str | None = None
    """Of a refusal: the field that it must name."""

    @property
    def streams(self) -> bool:
        return isinstance(self.body, dict) and self.body.get("stream") is True

    def streamed(self, **fields: Any) -> "Case":
        """The same request as a stream; `fields` are those that only streams have."""
        if not isinstance(self.body, dict):
            raise TypeError(f"{self.name} has no body that could stream")
        return replace(self, name=f"{self.name}, streamed", body={**self.body, "stream": True, **fields})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a case came to, without what differs from one request to the next (ids, times)."""

    status: int
    answer: Json
    """Of a stream: put together again, in the form of the whole answer."""

    @property
    def form(self) -> Json:
        return {"status": self.status, "answer": self.answer}


def problem_of(case: Case, outcome: Outcome) -> str | None:
    """What is wrong with the outcome by itself."""
    if outcome.status != case.status:
        return f"status {outcome.status} instead of {case.status}: {str(outcome.answer)[:300]}"
    if case.status >= 400:
        return _problem_of_refusal(case, outcome.answer)
    return case.check(outcome.answer) if case.check is not None else None


def _problem_of_refusal(case: Case, answer: Json) -> str | None:
    error: Any = answer.get("error")
    if not isinstance(error, dict) or error.keys() != {"message", "type", "param", "code"}:
        return f"no OpenAI error body: {str(answer)[:300]}"
    if case.error_param is not None and error["param"] != case.error_param:
        return f"the error names {error['param']!r} instead of {case.error_param!r}: {error['message']}"
    return None

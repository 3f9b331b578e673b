"""What is wrong with the outcomes of a battery: by themselves, stream against whole, one deployment against another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from pdserve.bench.semantics.case import Case, Json, Outcome, problem_of
from pdserve.bench.semantics.streams import whole_form


@dataclass(frozen=True, slots=True)
class Difference:
    case_name: str
    what: str


def differences(cases: Sequence[Case], outcomes: Mapping[str, Sequence[Outcome]]) -> list[Difference]:
    """`outcomes` by deployment, each in the order of the cases. The others should equal the first deployment's."""
    found: list[Difference] = []
    for arm, ours in outcomes.items():
        for index, (case, outcome) in enumerate(zip(cases, ours, strict=True)):
            problem = problem_of(case, outcome)
            if problem is None and case.streams and case.status == 200:
                problem = _difference_from_whole(outcome.answer, ours[index - 1].answer)
            if problem is not None:
                found.append(Difference(case.name, f"{arm}: {problem}"))
    reference, *others = outcomes.items()
    for arm, theirs in others:
        found += [
            Difference(
                case.name, f"{arm} differs from {reference[0]}: {first_difference(theirs_one.form, ours_one.form)}"
            )
            for case, ours_one, theirs_one in zip(cases, reference[1], theirs, strict=True)
            if ours_one != theirs_one
        ]
    return found


def _difference_from_whole(streamed: Json, whole: Json) -> str | None:
    if "response" in streamed:
        streamed_form, form = streamed["response"], whole
    elif "choices" in streamed and "choices" in whole:
        streamed_form, form = whole_form(streamed), whole_form(whole)
    else:
        return f"no answer to compare: {str(streamed)[:300]}"
    if streamed_form == form:
        return None
    return f"the stream differs from the whole answer: {first_difference(streamed_form, form)}"


def first_difference(ours: object, theirs: object, path: str = "") -> str:
    """Where two JSON values part, and what is there."""
    our_parts, their_parts = _parts(ours), _parts(theirs)
    for key in {**our_parts, **their_parts}:
        if our_parts.get(key) != their_parts.get(key):
            return first_difference(our_parts.get(key), their_parts.get(key), f"{path}.{key}")
    return f"{path}: {str(ours)[:200]!r} against {str(theirs)[:200]!r}"


def _parts(value: object) -> Mapping[str, object]:
    """What is in an object or a list, by key or index; nothing in anything else."""
    match value:
        case dict():
            return cast("dict[str, object]", value)
        case list():
            return {str(index): item for index, item in enumerate(cast("list[object]", value))}
        case _:
            return {}

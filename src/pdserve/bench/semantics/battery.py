"""All cases, whole and streamed."""

from pdserve.bench.semantics.case import Case
from pdserve.bench.semantics.chats import chat_cases
from pdserve.bench.semantics.completions import Texts, best_of_cases, completion_cases
from pdserve.bench.semantics.others import response_cases, token_cases
from pdserve.bench.semantics.refusals import refusal_cases

_WITH_USAGE = {"stream_options": {"include_usage": True}}


def battery(texts: Texts) -> list[Case]:
    """A streamed case comes right after the whole one that it must equal."""
    cases: list[Case] = []
    for case in [*completion_cases(texts), *chat_cases(texts)]:
        cases += [case, case.streamed(**_WITH_USAGE)]
    for case in response_cases(texts):
        cases += [case, case.streamed()]
    return [*cases, *best_of_cases(texts), *token_cases(texts), *refusal_cases()]

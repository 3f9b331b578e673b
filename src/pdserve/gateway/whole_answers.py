"""Answers that are read to their end before the client gets anything."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.gateway.answer_reader import AnswerReader
from pdserve.gateway.request_record import RequestRecord
from pdserve.sampling import TokenLogprobs
from pdserve.wire.cluster import Delta, FinishReason, TokenEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceAnswer:
    deltas: Sequence[Delta]
    finish_reason: FinishReason

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def entries(self) -> list[TokenEntry]:
        return [entry for delta in self.deltas for entry in delta.entries]

    @property
    def mean_logprob(self) -> float:
        """Of a token; of an answer without text, which has no entries, less than of any other."""
        logprobs = [entry.logprobs.logprob for entry in self.entries]
        return sum(logprobs) / len(logprobs) if logprobs else -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAnswer:
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """Of the second token on, where the request asks for them."""
    choices: tuple[ChoiceAnswer, ...]

    def best(self, num_choices: int) -> "PromptAnswer":
        """The choices of the highest mean logprob of a token, best first; of equal ones the earlier."""
        ranked = sorted(self.choices, key=lambda choice: choice.mean_logprob, reverse=True)
        return PromptAnswer(prompt_logprobs=self.prompt_logprobs, choices=tuple(ranked[:num_choices]))


class _Gathering:
    """What has come of the answer to one prompt."""

    def __init__(self, *, num_choices: int) -> None:
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._deltas: list[list[Delta]] = [[] for _ in range(num_choices)]
        self._finished: dict[int, ChoiceAnswer] = {}

    def add(self, delta: Delta) -> None:
        self._prompt_logprobs += delta.prompt_logprobs
        deltas = self._deltas[delta.choice_index]
        deltas.append(delta)
        if delta.finish_reason is not None:
            self._finished[delta.choice_index] = ChoiceAnswer(deltas=deltas, finish_reason=delta.finish_reason)

    def answer(self) -> PromptAnswer:
        """Requires: every choice has finished."""
        choices = tuple(self._finished[index] for index in range(len(self._deltas)))
        return PromptAnswer(prompt_logprobs=tuple(self._prompt_logprobs), choices=choices)


async def read_whole(reader: AnswerReader, record: RequestRecord) -> list[PromptAnswer]:
    """The answers by prompt. Raises: `RequestFailed`."""
    gathered = [_Gathering(num_choices=reader.num_choices) for _ in range(reader.num_prompts)]
    while not reader.is_finished:
        arrival = await reader.next()
        gathered[arrival.prompt_index].add(arrival.delta)
        record.delivered(arrival.prompt_index, arrival.delta)
    return [gathering.answer() for gathering in gathered]

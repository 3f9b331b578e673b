"""The deltas of all prompts and choices of one client's request, as they come."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pdserve.gateway.token_stream import TokenStream
from pdserve.wire.cluster import Delta, FinishReason


@dataclass(frozen=True, slots=True)
class Arrival:
    prompt_index: int
    delta: Delta


class AnswerReader:
    """Reads one stream a prompt, each with as many choices, until every choice has finished.

    Streams that have something take turns, so that none waits for another's end.
    """

    def __init__(self, streams: Sequence[TokenStream], *, num_choices: int, drops_tokens: bool = False) -> None:
        """With `drops_tokens` answers are empty, whatever was generated: the client wants the prompts alone."""
        self.num_prompts = len(streams)
        self.num_choices = num_choices
        self._streams = streams
        self._drops_tokens = drops_tokens
        self._changed = asyncio.Event()
        for stream in streams:
            stream.wake_with(self._changed)
        self._num_unfinished = [num_choices] * len(streams)
        self._turn = 0

    @property
    def is_finished(self) -> bool:
        return not any(self._num_unfinished)

    async def next(self) -> Arrival:
        """Ends at the latest when the dispatcher's deadline fails a request.

        Requires: not `is_finished`.
        Raises: `RequestFailed` as soon as one of the prompts has failed: there is no answer to a part of them.
        """
        while True:
            self._changed.clear()
            for _ in self._streams:
                prompt_index = self._turn
                self._turn = (prompt_index + 1) % len(self._streams)
                delta = self._streams[prompt_index].take()
                if delta is not None:
                    return self._arrival(prompt_index, delta)
            await self._changed.wait()

    def _arrival(self, prompt_index: int, delta: Delta) -> Arrival:
        if delta.finish_reason is not None:
            self._num_unfinished[prompt_index] -= 1
        return Arrival(prompt_index, _without_tokens(delta) if self._drops_tokens else delta)


def _without_tokens(delta: Delta) -> Delta:
    finish_reason = None if delta.finish_reason is None else FinishReason.LENGTH
    return msgspec.structs.replace(delta, token_ids=(), text="", entries=(), finish_reason=finish_reason)

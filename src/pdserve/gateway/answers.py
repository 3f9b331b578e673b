"""OpenAI's answer bodies: whole, and as the chunks of a stream. What the two completion APIs share."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from pdserve.gateway.logprobs import JsonObject
from pdserve.gateway.whole_answers import ChoiceAnswer, PromptAnswer
from pdserve.sampling import TokenLogprobs
from pdserve.wire.cluster import Delta


class ChoiceWriter(Protocol):
    """The bodies of one choice, without its index: either one `whole`, or `opening` and then chunks."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Of what it has written; None where an answer has no such part."""
        ...

    def whole(self, answer: ChoiceAnswer, prompt_logprobs: Sequence[TokenLogprobs]) -> JsonObject: ...

    def opening(self, prompt_logprobs: Sequence[TokenLogprobs]) -> JsonObject | None:
        """What precedes the answer in a stream: None where nothing does."""
        ...

    def chunk(self, delta: Delta) -> JsonObject | None:
        """None when the client would learn nothing by it."""
        ...


class AnswerShape(Protocol):
    """What differs between the two completion APIs."""

    object_name: str
    chunk_object_name: str

    def choice(self, prompt_index: int) -> ChoiceWriter: ...

    def whole_fields(self, prompts: Sequence[PromptAnswer]) -> JsonObject:
        """What a whole answer has beside its choices."""
        ...


class _StreamedPrompt:
    """The choices of the answer to one prompt, in a stream."""

    def __init__(self, writers: Sequence[ChoiceWriter]) -> None:
        self.writers = writers
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.opened: set[int] = set()


class AnswerWriter:
    """Bodies of one request's answer. The choices of prompt i have the indices from i * (choices a prompt) on."""

    def __init__(
        self,
        shape: AnswerShape,
        *,
        answer_id: str,
        created_s: int,
        model_name: str,
        system_fingerprint: str,
        num_prompts: int,
        num_choices: int,
        includes_usage: bool,
    ) -> None:
        """`num_choices` are those of each prompt that the client gets."""
        self._shape = shape
        self.num_choices = num_choices
        self.includes_usage = includes_usage
        self._prompts = [
            _StreamedPrompt([shape.choice(prompt_index) for _ in range(num_choices)])
            for prompt_index in range(num_prompts)
        ]
        self._head: JsonObject = {
            "id": answer_id,
            "created": created_s,
            "model": model_name,
            "system_fingerprint": system_fingerprint,
        }

    def whole(self, prompts: Sequence[PromptAnswer], *, num_prompt_tokens: int, num_tokens: int) -> JsonObject:
        bodies = [
            writer.whole(choice, prompt.prompt_logprobs)
            for prompt, streamed in zip(prompts, self._prompts, strict=True)
            for choice, writer in zip(prompt.choices, streamed.writers, strict=True)
        ]
        return {
            **self._head,
            "object": self._shape.object_name,
            "choices": [{"index": index, **body} for index, body in enumerate(bodies)],
            **self._shape.whole_fields(prompts),
            "usage": self._usage(num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens),
        }

    def chunks(self, prompt_index: int, delta: Delta) -> Iterator[JsonObject]:
        """What the client gets of this delta, perhaps nothing."""
        prompt = self._prompts[prompt_index]
        if delta.prompt_logprobs:
            prompt.prompt_logprobs += delta.prompt_logprobs
            return
        writer = prompt.writers[delta.choice_index]
        opening = None
        if delta.choice_index not in prompt.opened:
            prompt.opened.add(delta.choice_index)
            opening = writer.opening(prompt.prompt_logprobs)
        for body in (opening, writer.chunk(delta)):
            if body is not None:
                yield self._chunk({"index": prompt_index * self.num_choices + delta.choice_index, **body})

    def usage_chunk(self, *, num_prompt_tokens: int, num_tokens: int) -> JsonObject:
        """The last chunk, where the client asked for usage."""
        return {**self._chunk(), "usage": self._usage(num_prompt_tokens=num_prompt_tokens, num_tokens=num_tokens)}

    def _chunk(self, *choices: JsonObject) -> JsonObject:
        return {
            **self._head,
            "object": self._shape.chunk_object_name,
            "choices": list(choices),
            **({"usage": None} if self.includes_usage else {}),
        }

    def _usage(self, *, num_prompt_tokens: int, num_tokens: int) -> JsonObject:
        """Each prompt once, however many answers to it there are, and the tokens of all answers that were generated."""
        usage: JsonObject = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        by_choice = [writer.num_reasoning_tokens for prompt in self._prompts for writer in prompt.writers]
        known = [num_tokens for num_tokens in by_choice if num_tokens is not None]
        return {**usage, "completion_tokens_details": {"reasoning_tokens": sum(known)}} if known else usage

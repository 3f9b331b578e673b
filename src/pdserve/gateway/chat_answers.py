"""The choices of a chat completion."""

from collections.abc import Sequence

from pdserve.gateway.chat_message import ReasoningTokens, has_call, message, message_delta
from pdserve.gateway.chat_parser import ChatPiece, MakeChatParser
from pdserve.gateway.logprobs import JsonObject, TokenDetails, chat_logprobs, prompt_logprobs
from pdserve.gateway.whole_answers import ChoiceAnswer, PromptAnswer
from pdserve.sampling import TokenLogprobs
from pdserve.wire.cluster import Delta, FinishReason, TokenEntry

TOOL_CALLS = "tool_calls"
"""Why an answer ended that calls tools, in OpenAI's words."""


class ChatShape:
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, details: TokenDetails, make_parser: MakeChatParser) -> None:
        self._details = details
        self._make_parser = make_parser

    def choice(self, prompt_index: int) -> "ChatChoice":
        return ChatChoice(self._details, self._make_parser)

    def whole_fields(self, prompts: Sequence[PromptAnswer]) -> JsonObject:
        """A chat has one prompt; vLLM tells of it here."""
        if self._details.num_prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(prompts[0].prompt_logprobs, self._details)}


class ChatChoice:
    def __init__(self, details: TokenDetails, make_parser: MakeChatParser) -> None:
        self._details = details
        self._parser = make_parser()
        self._reasoning = ReasoningTokens()
        self._is_first = True
        self._has_call = False

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reasoning.num_tokens

    def whole(self, answer: ChoiceAnswer, prompt_logprobs: Sequence[TokenLogprobs]) -> JsonObject:
        pieces = [piece for delta in answer.deltas for piece in self._read(delta)]
        choice: JsonObject = {"message": message(pieces), "finish_reason": self._finish_reason(answer.finish_reason)}
        return self._with_details(choice, answer.token_ids, answer.entries, has_logprobs=True)

    def opening(self, prompt_logprobs: Sequence[TokenLogprobs]) -> JsonObject | None:
        return None

    def chunk(self, delta: Delta) -> JsonObject | None:
        """The first one has the role, whatever else there is to say."""
        pieces = self._read(delta)
        says_something = bool(pieces or delta.entries or self._details.has_token_ids)
        if not (self._is_first or says_something or delta.finish_reason is not None):
            return None
        body = message_delta(pieces)
        if self._is_first:
            self._is_first = False
            body = {"role": "assistant", "content": "", **body}
        choice: JsonObject = {
            "delta": body,
            "finish_reason": None if delta.finish_reason is None else self._finish_reason(delta.finish_reason),
        }
        return self._with_details(choice, delta.token_ids, delta.entries, has_logprobs=bool(delta.entries))

    def _read(self, delta: Delta) -> list[ChatPiece]:
        pieces = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces = [*pieces, *self._parser.finish()]
        self._has_call |= has_call(pieces)
        self._reasoning.add(len(delta.token_ids), pieces)
        return pieces

    def _finish_reason(self, finish_reason: FinishReason) -> str:
        return TOOL_CALLS if self._has_call and finish_reason is FinishReason.STOP else finish_reason.value

    def _with_details(
        self, choice: JsonObject, token_ids: Sequence[int], entries: Sequence[TokenEntry], *, has_logprobs: bool
    ) -> JsonObject:
        has_logprobs &= self._details.num_logprobs is not None
        choice["logprobs"] = chat_logprobs(entries, self._details.token_bytes) if has_logprobs else None
        if self._details.has_token_ids:
            choice["token_ids"] = list(token_ids)
        return choice

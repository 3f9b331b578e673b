"""The choices of a text completion."""

from collections.abc import Sequence

from pdserve.errors import InternalError
from pdserve.gateway.echo import Echo
from pdserve.gateway.errors import failure_of
from pdserve.gateway.failures import RequestFailed
from pdserve.gateway.logprobs import CompletionLogprobs, JsonObject, TokenDetails, prompt_logprobs
from pdserve.gateway.whole_answers import ChoiceAnswer, PromptAnswer
from pdserve.sampling import TokenLogprobs
from pdserve.wire.cluster import Delta, TokenEntry


class CompletionShape:
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, details: TokenDetails, echoes: Sequence[Echo] | None) -> None:
        """`echoes` are the prompts, where the answers begin with them."""
        self._details = details
        self._echoes = echoes

    def choice(self, prompt_index: int) -> "CompletionChoice":
        return CompletionChoice(self._details, None if self._echoes is None else self._echoes[prompt_index])

    def whole_fields(self, prompts: Sequence[PromptAnswer]) -> JsonObject:
        return {}


class CompletionChoice:
    num_reasoning_tokens = None

    def __init__(self, details: TokenDetails, echo: Echo | None) -> None:
        self._details = details
        self._echo = echo
        self._is_first = True

    def whole(self, answer: ChoiceAnswer, prompt_logprobs: Sequence[TokenLogprobs]) -> JsonObject:
        logprobs = self._logprobs()
        if logprobs is not None and self._echo is not None:
            self._add_prompt(logprobs, self._echo, prompt_logprobs)
        text = answer.text if self._echo is None else self._echo.text + answer.text
        choice = self._choice(text, logprobs, answer.entries, answer.token_ids, answer.finish_reason.value)
        return {**choice, **self._prompt_logprobs(prompt_logprobs)}

    def opening(self, prompt_logprobs: Sequence[TokenLogprobs]) -> JsonObject | None:
        if self._echo is None:
            return None
        self._is_first = False
        logprobs = self._logprobs()
        if logprobs is not None:
            self._add_prompt(logprobs, self._echo, prompt_logprobs)
        return self._choice(self._echo.text, logprobs, (), (), None)

    def chunk(self, delta: Delta) -> JsonObject | None:
        says_something = bool(delta.text or delta.entries or self._details.has_token_ids)
        if not (self._is_first or says_something or delta.finish_reason is not None):
            return None
        self._is_first = False
        finish_reason = None if delta.finish_reason is None else delta.finish_reason.value
        logprobs = self._logprobs() if delta.entries else None
        return self._choice(delta.text, logprobs, delta.entries, delta.token_ids, finish_reason)

    def _choice(
        self,
        text: str,
        logprobs: CompletionLogprobs | None,
        entries: Sequence[TokenEntry],
        token_ids: Sequence[int],
        finish_reason: str | None,
    ) -> JsonObject:
        if logprobs is not None:
            logprobs.add(entries, num_characters_before=0 if self._echo is None else len(self._echo.text))
        choice: JsonObject = {
            "text": text,
            "logprobs": None if logprobs is None else logprobs.body,
            "finish_reason": finish_reason,
        }
        if self._details.has_token_ids:
            choice["token_ids"] = list(token_ids)
        return choice

    def _logprobs(self) -> CompletionLogprobs | None:
        return None if self._details.num_logprobs is None else CompletionLogprobs(self._details)

    def _add_prompt(self, logprobs: CompletionLogprobs, echo: Echo, reported: Sequence[TokenLogprobs]) -> None:
        """Raises: `RequestFailed` when the worker reported too few or too many."""
        if len(reported) != len(echo.token_ids) - 1:
            error = InternalError(f"{len(reported)} logprobs came of the {len(echo.token_ids)} tokens of a prompt")
            raise RequestFailed(failure_of(error))
        logprobs.add_prompt(echo.token_ids, reported, echo.text_offsets(self._details.token_bytes))

    def _prompt_logprobs(self, reported: Sequence[TokenLogprobs]) -> JsonObject:
        if self._details.num_prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(reported, self._details)}

"""From a body to what is dispatched: parsed, checked, tokenized. Nothing here knows workers."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.errors import ConfigError, InvalidField, ModelNotFound, UnsupportedField
from pdserve.gateway.chat_request import parse_chat_request
from pdserve.gateway.completion_request import DEFAULT_MAX_TOKENS, parse_completion_request
from pdserve.gateway.sampling_fields import SamplingFields, sampling_params
from pdserve.gateway.tokenizer import GatewayTokenizer
from pdserve.sampling import SamplingParams

DEFAULT_MODEL = "default"
"""Names the one model that is served, whatever its own name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    fields: SamplingFields
    token_ids: tuple[int, ...]
    param: str
    """The field that holds it, for errors."""
    default_max_tokens: int | None
    """None: all that the context leaves."""

    def sampling(self, *, max_model_len: int) -> SamplingParams:
        """Raises: `ContextOverflow`."""
        return sampling_params(
            self.fields,
            num_prompt_tokens=len(self.token_ids),
            max_model_len=max_model_len,
            default_max_tokens=self.default_max_tokens,
            prompt_param=self.param,
        )


class PromptReader:
    """Every method raises `RequestError` for what the client did wrong. Tokenizing runs in a thread."""

    def __init__(self, tokenizer: GatewayTokenizer, *, model_name: str) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name

    async def chat(self, body: bytes) -> Prompt:
        request = parse_chat_request(body)
        self._require_model(request)
        messages = [message.as_template_input for message in request.messages]
        try:
            token_ids = await asyncio.to_thread(self._tokenizer.apply_chat_template, messages)
        except ConfigError as error:
            raise UnsupportedField(error.message, param="messages") from error
        return self._prompt(request, token_ids, param="messages", default_max_tokens=None)

    async def completion(self, body: bytes) -> Prompt:
        request = parse_completion_request(body)
        self._require_model(request)
        prompt = request.single_prompt
        token_ids = await asyncio.to_thread(self._tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
        return self._prompt(request, token_ids, param="prompt", default_max_tokens=DEFAULT_MAX_TOKENS)

    def _prompt(
        self, fields: SamplingFields, token_ids: list[int], *, param: str, default_max_tokens: int | None
    ) -> Prompt:
        if not token_ids:
            raise InvalidField(f"'{param}' has no tokens", param=param)
        self._require_known(token_ids, param=param)
        self._require_known(fields.stop_token_ids or (), param="stop_token_ids")
        self._require_known(fields.biases, param="logit_bias")
        return Prompt(fields=fields, token_ids=tuple(token_ids), param=param, default_max_tokens=default_max_tokens)

    def _require_model(self, fields: SamplingFields) -> None:
        if fields.model not in (self._model_name, DEFAULT_MODEL):
            raise ModelNotFound(
                f"there is no model {fields.model!r} here; ask for {self._model_name!r} or {DEFAULT_MODEL!r}",
                param="model",
            )

    def _require_known(self, token_ids: Iterable[int], *, param: str) -> None:
        vocab_size = self._tokenizer.vocab_size
        unknown = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
        if unknown is not None:
            raise InvalidField(f"'{param}' has token id {unknown}; the vocabulary is [0, {vocab_size})", param=param)

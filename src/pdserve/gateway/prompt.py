"""From a body to what is dispatched: parsed, checked, tokenized. Nothing here knows workers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from pdserve.errors import InvalidField
from pdserve.gateway.chat_options import ChatOptions
from pdserve.gateway.chat_parser import MakeChatParser, PlainParser
from pdserve.gateway.chat_prompt import chat_prompt
from pdserve.gateway.chat_request import parse_chat_request
from pdserve.gateway.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest
from pdserve.gateway.message_fields import ChatMessage
from pdserve.gateway.sampling_fields import SamplingFields, sampling_params
from pdserve.gateway.served_model import ServedModel
from pdserve.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    fields: SamplingFields
    token_ids: tuple[int, ...]
    param: str
    """The field that holds it, for errors."""
    default_max_tokens: int | None
    """None: all that the context leaves."""
    text: str | None = None
    """As the client sent it; None where it sent tokens or messages."""
    make_parser: MakeChatParser = PlainParser
    """What reads each answer to it, in chat."""
    grammar: str | None = None
    """What each answer must match."""
    needs_special_tokens: bool = False
    """`make_parser` reads texts with special tokens, whatever the client asked for."""

    def sampling(self, *, max_model_len: int) -> SamplingParams:
        """Raises: `ContextOverflow`, `InvalidField`."""
        params = sampling_params(
            self.fields,
            num_prompt_tokens=len(self.token_ids),
            max_model_len=max_model_len,
            default_max_tokens=self.default_max_tokens,
            prompt_param=self.param,
        )
        skips = params.skip_special_tokens and not self.needs_special_tokens
        return msgspec.structs.replace(params, grammar=self.grammar, skip_special_tokens=skips)


class PromptReader:
    """Every method raises `RequestError` for what the client did wrong."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    async def chat(self, body: bytes) -> Prompt:
        request = parse_chat_request(body)
        return await self.conversation(request, request.messages, param="messages", options=request.options)

    async def completion(self, request: CompletionRequest) -> list[Prompt]:
        self._model.require_named(request.model)
        structure = await asyncio.to_thread(request.structure)
        grammar = None if structure is None else await self._model.compiled(structure)
        prompts = [await self._completion(request, prompt) for prompt in request.prompts]
        return [replace(prompt, grammar=grammar) for prompt in prompts]

    async def conversation(
        self,
        fields: SamplingFields,
        messages: Sequence[ChatMessage],
        *,
        param: str,
        options: ChatOptions = ChatOptions(),  # noqa: B008
    ) -> Prompt:
        """`param` is the field that holds the messages."""
        self._model.require_named(fields.model)
        structure = await asyncio.to_thread(fields.structure)
        chat = chat_prompt(messages, options, self._model.formats)
        rendered = await self._model.tokenize_chat(chat.conversation, param=param)
        start = chat.reasoning_start(rendered.text)
        prompt = self._prompt(fields, rendered.token_ids, param=param, default_max_tokens=None)
        return replace(
            prompt,
            grammar=await self._model.compiled_chat(chat, structure, start),
            make_parser=chat.make_parser(start, keeps_special_tokens=fields.skip_special_tokens is False),
            needs_special_tokens=chat.needs_special_tokens,
        )

    async def _completion(self, request: CompletionRequest, prompt: str | list[int]) -> Prompt:
        token_ids = await self._model.tokenize(prompt) if isinstance(prompt, str) else prompt
        read = self._prompt(request, token_ids, param="prompt", default_max_tokens=DEFAULT_MAX_TOKENS)
        return replace(read, text=prompt) if isinstance(prompt, str) else read

    def _prompt(
        self, fields: SamplingFields, token_ids: list[int], *, param: str, default_max_tokens: int | None
    ) -> Prompt:
        if not token_ids:
            raise InvalidField(f"'{param}' has no tokens", param=param)
        self._model.require_known(token_ids, param=param)
        self._model.require_known(fields.stop_token_ids or (), param="stop_token_ids")
        self._model.require_known(fields.biases, param="logit_bias")
        return Prompt(fields=fields, token_ids=tuple(token_ids), param=param, default_max_tokens=default_max_tokens)

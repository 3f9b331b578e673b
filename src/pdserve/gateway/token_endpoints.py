"""`POST /tokenize` and `POST /detokenize`: the served model's tokenizer, as vLLM offers it."""

import msgspec
from aiohttp import web

from pdserve.gateway.chat_prompt import chat_prompt
from pdserve.gateway.hub import Hub
from pdserve.gateway.request_body import RequestBodies
from pdserve.gateway.served_model import ServedModel
from pdserve.gateway.token_requests import (
    TokenizeChat,
    TokenizeText,
    parse_detokenize_request,
    parse_tokenize_request,
)


class TokenEndpoints:
    """Handlers. They need no worker; without one, `max_model_len` is null."""

    def __init__(self, bodies: RequestBodies, model: ServedModel, hub: Hub) -> None:
        self._bodies = bodies
        self._model = model
        self._hub = hub

    async def tokenize(self, request: web.Request) -> web.Response:
        asked = parse_tokenize_request(await self._bodies.read(request))
        self._model.require_named(asked.model)
        token_ids = await self._token_ids(asked)
        return _json({"count": len(token_ids), "max_model_len": self._hub.max_model_len, "tokens": token_ids})

    async def detokenize(self, request: web.Request) -> web.Response:
        asked = parse_detokenize_request(await self._bodies.read(request))
        self._model.require_named(asked.model)
        return _json({"prompt": await self._model.detokenize(asked.tokens, param="tokens")})

    async def _token_ids(self, asked: TokenizeText | TokenizeChat) -> list[int]:
        if isinstance(asked, TokenizeText):
            return await self._model.tokenize(asked.prompt, add_special_tokens=asked.add_special_tokens)
        conversation = chat_prompt(asked.messages, asked.options, self._model.formats).conversation
        return (await self._model.tokenize_chat(conversation, param="messages")).token_ids


def _json(content: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")

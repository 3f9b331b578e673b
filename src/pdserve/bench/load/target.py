"""The server that a load is sent to, as far as it says itself what it is."""

from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from pdserve.errors import ConfigError
from pdserve.wire.bearer import bearer_headers

LOOK_TIMEOUT_S = 10.0
ORDINARY_TOKEN_IDS = tuple(range(1000, 5000))
"""What prompts are drawn from where the server does not tokenize for us: in the vocabularies of today's models the
special tokens, bytes and single characters lie before these, and other special tokens behind them."""
LEAST_DIFFERENT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    model: str
    max_model_len: int | None
    """None: it does not tell."""
    token_ids: tuple[int, ...]
    """Of a natural text, or ordinary ones."""
    tokenizes: bool
    """The token ids are of a natural text."""
    is_pdserve: bool
    """It lists workers, and they keep traces."""


async def look_at(
    session: aiohttp.ClientSession, url: str, *, model: str | None, api_key: str | None, text: str
) -> Target:
    """What is at `url`; `model` is what it must serve, None for the first that it names.

    Raises: `ConfigError` when nothing answers there, refuses us, or does not serve the model.
    """
    asker = _Asker(session, url, api_key=api_key)
    models = await asker.models()
    chosen = next((each for each in models if model in (None, each["id"])), None)
    if chosen is None:
        names = ", ".join(each["id"] for each in models) or "none"
        raise ConfigError(f"{url} does not serve {model!r}; it serves: {names}")
    token_ids = await asker.tokenize(chosen["id"], text)
    tokenizes = len(set(token_ids)) >= LEAST_DIFFERENT_TOKENS
    max_model_len = chosen.get("max_model_len")
    return Target(
        model=chosen["id"],
        max_model_len=max_model_len if isinstance(max_model_len, int) else None,
        token_ids=tuple(token_ids) if tokenizes else ORDINARY_TOKEN_IDS,
        tokenizes=tokenizes,
        is_pdserve=await asker.lists_workers(),
    )


class _Asker:
    def __init__(self, session: aiohttp.ClientSession, url: str, *, api_key: str | None) -> None:
        self._session = session
        self._url = url
        self._headers = bearer_headers(api_key)

    async def models(self) -> list[dict[str, Any]]:
        status, body = await self._ask("GET", "/v1/models")
        if status in (401, 403):
            raise ConfigError(f"{self._url} refuses our key ({status}); set PDSERVE_API_KEY to one that it takes")
        try:
            answer = msgspec.json.decode(body)
            return [{**each, "id": str(each["id"])} for each in answer["data"]]
        except (msgspec.DecodeError, KeyError, TypeError):
            raise ConfigError(
                f"{self._url}/v1/models answers {status} and no list of models: give the URL of an OpenAI-compatible "
                "server, without /v1"
            ) from None

    async def tokenize(self, model: str, text: str) -> list[int]:
        """Empty where the server can't, as pdserve and vLLM can."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        status, answer = await self._ask("POST", "/tokenize", body)
        try:
            return msgspec.json.decode(answer, type=_Tokens).tokens if status == 200 else []
        except msgspec.DecodeError:
            return []

    async def lists_workers(self) -> bool:
        status, body = await self._ask("GET", "/workers")
        return status == 200 and b'"model_fingerprint"' in body

    async def _ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S)
        try:
            async with self._session.request(
                method, self._url + path, json=body, headers=self._headers, timeout=timeout
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ConfigError(f"can't reach {self._url}: {error or 'no answer'}; is a server running there?") from error


class _Tokens(msgspec.Struct):
    tokens: list[int]

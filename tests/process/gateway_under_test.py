"""A real gateway application on loopback, with a tokenizer that counts bytes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import openai
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from pdserve.clock import Clock
from pdserve.errors import ConfigError
from pdserve.gateway.app import build_app
from pdserve.gateway.settings import GatewaySettings
from pdserve.text.chat_template import ChatTemplate, Conversation

SETTINGS = GatewaySettings(model_name="smol", model_dir=Path("/nowhere"), request_timeout_s=20.0, max_body_bytes=65_536)


CHAT_TEMPLATE = """\
{%- if messages[0].role == 'assistant' %}{{ raise_exception('a chat begins with the user') }}{% endif %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}
{%- if not add_generation_prompt %}.{% endif %}"""


class ByteTokenizer:
    """One token a byte; a chat is its roles and contents."""

    vocab_size = 256
    eos_token_ids: frozenset[int] = frozenset()
    special_tokens: Mapping[str, int] = MappingProxyType({})
    as_json = "byte"

    def __init__(self, chat_template: str = CHAT_TEMPLATE) -> None:
        self.chat_template = ChatTemplate(chat_template, special_tokens={})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode_verbatim(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if 0 <= token_id < self.vocab_size else b""

    def render_chat(self, conversation: Conversation) -> str:
        if conversation.messages[0]["content"] == "no template":
            raise ConfigError("the model has no chat template")
        return self.chat_template.render(conversation)


@dataclass(frozen=True, slots=True)
class RunningGateway:
    url: str
    session: aiohttp.ClientSession
    clients: AsyncExitStack
    runner: web.AppRunner

    def client(self, api_key: str = "none") -> openai.AsyncOpenAI:
        """Open until the gateway ends."""
        client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=20.0)
        self.clients.push_async_callback(client.close)
        return client

    async def post(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, decoded body, headers."""
        arguments: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(self.url + path, **arguments) as response:
            return response.status, await response.json(), dict(response.headers)

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    async def metric(self, name: str, **labels: str) -> float:
        """A sample of `/metrics`; 0 when it is not there yet."""
        async with self.session.get(self.url + "/metrics") as response:
            text = await response.text()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return 0.0

    async def stop(self) -> None:
        """As a signal stops it."""
        await self.runner.cleanup()

    async def until_idle(self) -> None:
        """Wait until no request is pending."""
        await until(lambda: self.metric("pdserve:requests_pending"), lambda pending: pending == 0)


async def until(read: Callable[[], Any], accepts: Callable[[Any], bool], *, timeout_s: float = 5.0) -> Any:
    """Poll an observable of another task until it has the wanted value."""
    async with asyncio.timeout(timeout_s):
        while not accepts(value := await read()):  # noqa: ASYNC110, the other task can't set an event of the test's
            await asyncio.sleep(0.01)
    return value


@asynccontextmanager
async def gateway(*, clock: Clock | None = None, **changed: Any) -> AsyncGenerator[RunningGateway]:
    """Served as `run_gateway` serves it, on a free port; idle again at the end (rule H7)."""
    app = build_app(replace(SETTINGS, **changed), ByteTokenizer(), clock=clock)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port: int = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as session, AsyncExitStack() as clients:
            running = RunningGateway(f"http://127.0.0.1:{port}", session, clients, runner)
            yield running
            if runner.sites:
                await running.until_idle()
    finally:
        await runner.cleanup()

"""`POST /v1/chat/completions` and `POST /v1/completions`."""

import secrets
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from pdserve.clock import Clock
from pdserve.gateway.answering import answer_in_events, answer_whole
from pdserve.gateway.answers import AnswerShape, AnswerWriter, ChatShape, CompletionShape
from pdserve.gateway.dispatcher import Work
from pdserve.gateway.event_writer import EventWriter
from pdserve.gateway.hub import Hub
from pdserve.gateway.prompt import Prompt, PromptReader
from pdserve.gateway.request_body import read_body
from pdserve.gateway.request_record import RequestRecord
from pdserve.gateway.request_scope import request_scope
from pdserve.gateway.served_model import ServedModel
from pdserve.gateway.settings import GatewaySettings
from pdserve.ids import RequestId
from pdserve.telemetry.gateway_metrics import GatewayMetrics
from pdserve.telemetry.instants import Instant
from pdserve.telemetry.trace import TRACE_HEADER
from pdserve.units import seconds_to_ns


class CompletionEndpoints:
    """Handlers. A client that leaves cancels its handler, which aborts the request (`handler_cancellation`)."""

    def __init__(
        self, settings: GatewaySettings, model: ServedModel, hub: Hub, metrics: GatewayMetrics, clock: Clock
    ) -> None:
        self._settings = settings
        self._model = model
        self._reader = PromptReader(model)
        self._hub = hub
        self._metrics = metrics
        self._clock = clock

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, self._reader.chat, ChatShape())

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, self._reader.completion, CompletionShape())

    async def _complete(
        self, request: web.Request, read_prompt: Callable[[bytes], Awaitable[Prompt]], shape: AnswerShape
    ) -> web.StreamResponse:
        record = RequestRecord(self._metrics, self._clock)
        request_id = RequestId(shape.id_prefix + secrets.token_hex(16))
        deadline_ns = self._clock.now_ns() + seconds_to_ns(self._settings.request_timeout_s)
        with request_scope(request_id, record, self._hub):
            prompt = await read_prompt(await read_body(request, timeout_s=self._settings.body_timeout_s))
            record.tokenized(len(prompt.token_ids))
            work = Work(
                request_id=request_id,
                prompt_token_ids=prompt.token_ids,
                sampling=prompt.sampling(max_model_len=self._hub.require_max_model_len()),
                deadline_ns=deadline_ns,
                streams=bool(prompt.fields.stream),
                traced=request.headers.get(TRACE_HEADER) == "1",
            )
            stream = self._hub.submit(work)
            record.at(Instant.DISPATCHED)
            writer = self._writer(shape, request_id, prompt)
            if not work.streams:
                return await answer_whole(stream, writer, record)
            events = EventWriter(request, write_timeout_s=self._settings.write_timeout_s)
            return await answer_in_events(stream, writer, record, events)

    def _writer(self, shape: AnswerShape, request_id: RequestId, prompt: Prompt) -> AnswerWriter:
        return AnswerWriter(
            shape,
            answer_id=request_id,
            created_s=int(time.time()),
            model_name=self._settings.model_name,
            system_fingerprint=f"pdserve-{self._hub.fingerprint}",
            returns_token_ids=bool(prompt.fields.return_token_ids),
            includes_usage=prompt.fields.includes_usage,
            token_bytes=None if prompt.fields.num_top_logprobs is None else self._model.token_bytes,
        )

"""`POST /v1/responses`: OpenAI's Responses API without what needs a store or tools."""

import secrets
import time

import msgspec
from aiohttp import web

from pdserve.clock import Clock
from pdserve.errors import ContextOverflow
from pdserve.gateway.answer_reader import AnswerReader
from pdserve.gateway.dispatcher import Work
from pdserve.gateway.event_writer import EventWriter
from pdserve.gateway.failures import RequestFailed
from pdserve.gateway.hub import Hub
from pdserve.gateway.prompt import Prompt, PromptReader
from pdserve.gateway.request_body import RequestBodies
from pdserve.gateway.request_record import RequestRecord
from pdserve.gateway.request_scope import request_scope
from pdserve.gateway.responses_answers import Ending, ResponseWriter
from pdserve.gateway.responses_request import ResponsesRequest, parse_responses_request
from pdserve.gateway.served_model import ServedModel
from pdserve.gateway.settings import GatewaySettings
from pdserve.gateway.whole_answers import read_whole
from pdserve.ids import RequestId
from pdserve.sampling import SamplingParams
from pdserve.telemetry.gateway_metrics import GatewayMetrics
from pdserve.telemetry.instants import Instant
from pdserve.telemetry.trace import TRACE_HEADER
from pdserve.units import seconds_to_ns
from pdserve.wire.cluster import FinishReason


class ResponsesEndpoints:
    """A handler. A client that leaves cancels it, which aborts the request (`handler_cancellation`)."""

    def __init__(
        self,
        settings: GatewaySettings,
        bodies: RequestBodies,
        model: ServedModel,
        hub: Hub,
        metrics: GatewayMetrics,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._bodies = bodies
        self._model = model
        self._reader = PromptReader(model)
        self._hub = hub
        self._metrics = metrics
        self._clock = clock

    async def create(self, request: web.Request) -> web.StreamResponse:
        record = RequestRecord(self._metrics, self._clock)
        request_id = RequestId("resp_" + secrets.token_hex(16))
        deadline_ns = self._clock.now_ns() + seconds_to_ns(self._settings.request_timeout_s)
        with request_scope(request_id, record, self._hub) as works:
            asked = parse_responses_request(await self._bodies.read(request))
            prompt = await self._reader.conversation(asked.sampling_fields, asked.messages, param="input")
            record.tokenized(len(prompt.token_ids))
            work = Work(
                request_id=request_id,
                prompt_token_ids=prompt.token_ids,
                sampling=_sampling(prompt, max_model_len=self._hub.require_max_model_len()),
                deadline_ns=deadline_ns,
                traced=request.headers.get(TRACE_HEADER) == "1",
            )
            reader = AnswerReader([works.submit(work)], num_choices=1)
            record.at(Instant.DISPATCHED)
            writer = self._writer(asked, request_id, prompt)
            if not asked.stream:
                return await _answer_whole(reader, writer, record)
            events = EventWriter(request, write_timeout_s=self._settings.write_timeout_s)
            return await _answer_in_events(reader, writer, record, events)

    def _writer(self, asked: ResponsesRequest, request_id: RequestId, prompt: Prompt) -> ResponseWriter:
        return ResponseWriter(
            asked,
            response_id=request_id,
            created_s=int(time.time()),
            model_name=self._settings.model_name,
            token_bytes=self._model.token_bytes,
            parser=prompt.make_parser(),
        )


async def _answer_whole(reader: AnswerReader, writer: ResponseWriter, record: RequestRecord) -> web.Response:
    """Raises: `RequestFailed`."""
    ((answer,),) = [prompt.choices for prompt in await read_whole(reader, record)]
    for delta in answer.deltas:
        writer.read(delta)
    ending = _ending(answer.finish_reason, record)
    writer.closing(ending)
    body = writer.whole(ending)
    record.finished()
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


async def _answer_in_events(
    reader: AnswerReader, writer: ResponseWriter, record: RequestRecord, events: EventWriter
) -> web.StreamResponse:
    """Nothing is sent before the first delta, so a failure until then is raised and gets its own HTTP status.

    After that a failure is the event `response.failed`, the last one.
    Raises: `RequestFailed` before the first delta, `ConnectionError` when the client does not take an event.
    """
    try:
        while True:
            delta = (await reader.next()).delta
            if not events.has_started:
                await events.send_all(writer.opening())
            await events.send_all(writer.read(delta))
            record.delivered(0, delta)
            if delta.finish_reason is not None:
                break
    except RequestFailed as error:
        if not events.has_started:
            raise
        record.failed(error.failure)
        await events.send_all([writer.failed(error.failure)])
        return events.response
    await events.send_all(writer.closing(_ending(delta.finish_reason, record)))
    record.finished()
    return events.response


def _ending(finish_reason: FinishReason, record: RequestRecord) -> Ending:
    return Ending(
        finish_reason=finish_reason,
        finished_s=int(time.time()),
        num_prompt_tokens=record.num_prompt_tokens,
        num_tokens=record.num_tokens,
    )


def _sampling(prompt: Prompt, *, max_model_len: int) -> SamplingParams:
    """Raises: `ContextOverflow` that names this API's field."""
    try:
        return prompt.sampling(max_model_len=max_model_len)
    except ContextOverflow as error:
        param = "max_output_tokens" if error.param == "max_tokens" else error.param
        raise ContextOverflow(error.message, param=param) from error

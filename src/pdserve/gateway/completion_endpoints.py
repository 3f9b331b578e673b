"""`POST /v1/chat/completions` and `POST /v1/completions`."""

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from pdserve.clock import Clock
from pdserve.gateway.answer_reader import AnswerReader
from pdserve.gateway.answering import answer_in_events, answer_whole
from pdserve.gateway.answers import AnswerShape, AnswerWriter
from pdserve.gateway.chat_answers import ChatShape
from pdserve.gateway.completion_answers import CompletionShape
from pdserve.gateway.completion_request import CompletionRequest, parse_completion_request
from pdserve.gateway.dispatcher import Work
from pdserve.gateway.echo import Echo
from pdserve.gateway.event_writer import EventWriter
from pdserve.gateway.hub import Hub
from pdserve.gateway.logprobs import TokenDetails
from pdserve.gateway.prompt import Prompt, PromptReader
from pdserve.gateway.request_body import RequestBodies
from pdserve.gateway.request_record import RequestRecord
from pdserve.gateway.request_scope import Works, request_scope
from pdserve.gateway.sampling_fields import SamplingFields
from pdserve.gateway.served_model import ServedModel
from pdserve.gateway.settings import GatewaySettings
from pdserve.ids import RequestId
from pdserve.telemetry.gateway_metrics import GatewayMetrics
from pdserve.telemetry.instants import Instant
from pdserve.telemetry.trace import TRACE_HEADER
from pdserve.units import seconds_to_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A body that was read and checked."""

    fields: SamplingFields
    prompts: Sequence[Prompt]
    shape: AnswerShape
    num_generated: int
    """Answers to each prompt; the client gets `fields.num_choices` of them."""
    drops_tokens: bool = False


class CompletionEndpoints:
    """Handlers. A client that leaves cancels its handler, which aborts the request (`handler_cancellation`)."""

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

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, "chatcmpl-", self._read_chat)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, "cmpl-", self._read_completion)

    async def _complete(
        self, request: web.Request, id_prefix: str, read: Callable[[bytes], Awaitable[_Asked]]
    ) -> web.StreamResponse:
        record = RequestRecord(self._metrics, self._clock)
        request_id = RequestId(id_prefix + secrets.token_hex(16))
        deadline_ns = self._clock.now_ns() + seconds_to_ns(self._settings.request_timeout_s)
        with request_scope(request_id, record, self._hub) as works:
            asked = await read(await self._bodies.read(request))
            record.tokenized(sum(len(prompt.token_ids) for prompt in asked.prompts))
            traced = request.headers.get(TRACE_HEADER) == "1"
            reader = self._submit(asked, works, request_id, deadline_ns=deadline_ns, traced=traced)
            record.at(Instant.DISPATCHED)
            writer = self._writer(asked, request_id)
            if not asked.fields.stream:
                return await answer_whole(reader, writer, record)
            events = EventWriter(request, write_timeout_s=self._settings.write_timeout_s)
            return await answer_in_events(reader, writer, record, events)

    async def _read_chat(self, body: bytes) -> _Asked:
        prompt = await self._reader.chat(body)
        fields = prompt.fields
        shape = ChatShape(self._details(fields, num_logprobs=fields.num_top_logprobs), prompt.make_parser)
        return _Asked(fields=fields, prompts=[prompt], shape=shape, num_generated=fields.num_choices)

    async def _read_completion(self, body: bytes) -> _Asked:
        fields = parse_completion_request(body)
        prompts = await self._reader.completion(fields)
        shape = CompletionShape(
            self._details(fields, num_logprobs=fields.logprobs), await self._echoes(fields, prompts)
        )
        return _Asked(
            fields=fields,
            prompts=prompts,
            shape=shape,
            num_generated=fields.num_generated,
            drops_tokens=fields.echoes_only,
        )

    async def _echoes(self, fields: CompletionRequest, prompts: Sequence[Prompt]) -> list[Echo] | None:
        if not fields.echo:
            return None
        return [
            Echo(
                text=await self._model.detokenize(prompt.token_ids, param="prompt")
                if prompt.text is None
                else prompt.text,
                token_ids=prompt.token_ids,
            )
            for prompt in prompts
        ]

    def _details(self, fields: SamplingFields, *, num_logprobs: int | None) -> TokenDetails:
        return TokenDetails(
            num_logprobs=num_logprobs,
            num_prompt_logprobs=fields.prompt_logprobs,
            has_token_ids=bool(fields.return_token_ids),
            token_bytes=self._model.token_bytes,
        )

    def _submit(
        self, asked: _Asked, works: Works, request_id: RequestId, *, deadline_ns: int, traced: bool
    ) -> AnswerReader:
        """All prompts or none. Raises: `RequestError`, `RequestFailed`."""
        max_model_len = self._hub.require_max_model_len()
        samplings = [prompt.sampling(max_model_len=max_model_len) for prompt in asked.prompts]
        request_ids = [request_id]
        if len(asked.prompts) > 1:
            request_ids = [RequestId(f"{request_id}-{index}") for index in range(len(asked.prompts))]
        streams = [
            works.submit(
                Work(
                    request_id=work_id,
                    prompt_token_ids=prompt.token_ids,
                    sampling=sampling,
                    num_choices=asked.num_generated,
                    deadline_ns=deadline_ns,
                    traced=traced,
                )
            )
            for work_id, prompt, sampling in zip(request_ids, asked.prompts, samplings, strict=True)
        ]
        return AnswerReader(streams, num_choices=asked.num_generated, drops_tokens=asked.drops_tokens)

    def _writer(self, asked: _Asked, request_id: RequestId) -> AnswerWriter:
        return AnswerWriter(
            asked.shape,
            answer_id=request_id,
            created_s=int(time.time()),
            model_name=self._settings.model_name,
            system_fingerprint=f"pdserve-{self._hub.fingerprint}",
            num_prompts=len(asked.prompts),
            num_choices=asked.fields.num_choices,
            includes_usage=asked.fields.includes_usage,
        )

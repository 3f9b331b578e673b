"""Reads a token stream and answers the client, whole or in server-sent events."""

import asyncio

import msgspec
from aiohttp import web

from pdserve.gateway.answers import AnswerWriter
from pdserve.gateway.failures import RequestFailed
from pdserve.gateway.request_record import RequestRecord
from pdserve.gateway.token_stream import TokenStream
from pdserve.wire.cluster import TokenEntry


async def answer_whole(stream: TokenStream, writer: AnswerWriter, record: RequestRecord) -> web.Response:
    """Raises: `RequestFailed`."""
    texts: list[str] = []
    token_ids: list[int] = []
    entries: list[TokenEntry] = []
    num_restarts = 0
    finish_reason = None
    while finish_reason is None:
        delta = await stream.next()
        if stream.num_restarts != num_restarts:
            num_restarts = stream.num_restarts
            texts.clear()
            token_ids.clear()
            entries.clear()
            record.restarted()
        texts.append(delta.text)
        token_ids += delta.token_ids
        entries += delta.entries
        record.delivered(delta)
        finish_reason = delta.finish_reason
    answer = writer.whole("".join(texts), token_ids, entries, finish_reason, num_prompt_tokens=record.num_prompt_tokens)
    record.finished(finish_reason)
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


class EventStream:
    """The server-sent events of one answer."""

    def __init__(self, request: web.Request, *, write_timeout_s: float) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )

    async def answer(self, stream: TokenStream, writer: AnswerWriter, record: RequestRecord) -> web.StreamResponse:
        """Nothing is sent before the first delta, so a failure until then is raised and gets its own HTTP status.

        After that a failure is an event, and the stream ends without `[DONE]`.
        Raises: `RequestFailed` before the first delta, `ConnectionError` when the client does not take an event.
        """
        delta = await stream.next()
        await self._response.prepare(self._request)
        is_first = True
        try:
            while True:
                if is_first or delta.finish_reason is not None or writer.says_something(delta):
                    await self._send(writer.chunk(delta, is_first=is_first))
                    is_first = False
                record.delivered(delta)
                if delta.finish_reason is not None:
                    break
                delta = await stream.next()
        except RequestFailed as error:
            record.failed(error.failure)
            await self._send(error.failure.body)
            return self._response
        if writer.includes_usage:
            await self._send(
                writer.usage_chunk(num_prompt_tokens=record.num_prompt_tokens, num_tokens=record.num_tokens)
            )
        await self._write(b"[DONE]")
        record.finished(delta.finish_reason)
        return self._response

    async def _send(self, event: dict[str, object]) -> None:
        await self._write(msgspec.json.encode(event))

    async def _write(self, event: bytes) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self._response.write(b"data: " + event + b"\n\n")
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionAbortedError("the client does not read") from error

"""Reads a token stream and answers the client, whole or in server-sent events."""

import msgspec
from aiohttp import web

from pdserve.gateway.answers import AnswerWriter
from pdserve.gateway.event_writer import EventWriter
from pdserve.gateway.failures import RequestFailed
from pdserve.gateway.request_record import RequestRecord
from pdserve.gateway.token_stream import TokenStream
from pdserve.wire.cluster import Delta, FinishReason


async def read_whole(stream: TokenStream, record: RequestRecord) -> tuple[list[Delta], FinishReason]:
    """All deltas of the answer, without those of attempts that were lost. Raises: `RequestFailed`."""
    deltas: list[Delta] = []
    num_restarts = 0
    while True:
        delta = await stream.next()
        if stream.num_restarts != num_restarts:
            num_restarts = stream.num_restarts
            deltas.clear()
            record.restarted()
        deltas.append(delta)
        record.delivered(delta)
        if delta.finish_reason is not None:
            return deltas, delta.finish_reason


async def answer_whole(stream: TokenStream, writer: AnswerWriter, record: RequestRecord) -> web.Response:
    """Raises: `RequestFailed`."""
    deltas, finish_reason = await read_whole(stream, record)
    answer = writer.whole(
        "".join(delta.text for delta in deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
        [entry for delta in deltas for entry in delta.entries],
        finish_reason,
        num_prompt_tokens=record.num_prompt_tokens,
    )
    record.finished(finish_reason)
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


async def answer_in_events(
    stream: TokenStream, writer: AnswerWriter, record: RequestRecord, events: EventWriter
) -> web.StreamResponse:
    """Nothing is sent before the first delta, so a failure until then is raised and gets its own HTTP status.

    After that a failure is an event, and the stream ends without `[DONE]`.
    Raises: `RequestFailed` before the first delta, `ConnectionError` when the client does not take an event.
    """
    delta = await stream.next()
    await events.start()
    is_first = True
    try:
        while True:
            if is_first or delta.finish_reason is not None or writer.says_something(delta):
                await events.send_data(msgspec.json.encode(writer.chunk(delta, is_first=is_first)))
                is_first = False
            record.delivered(delta)
            if delta.finish_reason is not None:
                break
            delta = await stream.next()
    except RequestFailed as error:
        record.failed(error.failure)
        await events.send_data(msgspec.json.encode(error.failure.body))
        return events.response
    if writer.includes_usage:
        usage = writer.usage_chunk(num_prompt_tokens=record.num_prompt_tokens, num_tokens=record.num_tokens)
        await events.send_data(msgspec.json.encode(usage))
    await events.send_data(b"[DONE]")
    record.finished(delta.finish_reason)
    return events.response

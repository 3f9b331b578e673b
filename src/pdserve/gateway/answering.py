"""Reads the answer to a client's request and sends it, whole or in server-sent events."""

import msgspec
from aiohttp import web

from pdserve.gateway.answer_reader import AnswerReader
from pdserve.gateway.answers import AnswerWriter
from pdserve.gateway.event_writer import EventWriter
from pdserve.gateway.failures import RequestFailed
from pdserve.gateway.request_record import RequestRecord
from pdserve.gateway.whole_answers import read_whole


async def answer_whole(reader: AnswerReader, writer: AnswerWriter, record: RequestRecord) -> web.Response:
    """The best choices where more were generated than the client wants. Raises: `RequestFailed`."""
    prompts = await read_whole(reader, record)
    if reader.num_choices > writer.num_choices:
        prompts = [prompt.best(writer.num_choices) for prompt in prompts]
    answer = writer.whole(prompts, num_prompt_tokens=record.num_prompt_tokens, num_tokens=record.num_tokens)
    record.finished()
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


async def answer_in_events(
    reader: AnswerReader, writer: AnswerWriter, record: RequestRecord, events: EventWriter
) -> web.StreamResponse:
    """Nothing is sent before the first chunk, so a failure until then is raised and gets its own HTTP status.

    After that a failure is an event, and the stream ends without `[DONE]`.
    Requires: as many choices are read as the client gets.
    Raises: `RequestFailed` before the first chunk, `ConnectionError` when the client does not take an event.
    """
    try:
        while not reader.is_finished:
            arrival = await reader.next()
            for chunk in writer.chunks(arrival.prompt_index, arrival.delta):
                await events.send_data(msgspec.json.encode(chunk))
            record.delivered(arrival.prompt_index, arrival.delta)
    except RequestFailed as error:
        if not events.has_started:
            raise
        record.failed(error.failure)
        await events.send_data(msgspec.json.encode(error.failure.body))
        return events.response
    if writer.includes_usage:
        usage = writer.usage_chunk(num_prompt_tokens=record.num_prompt_tokens, num_tokens=record.num_tokens)
        await events.send_data(msgspec.json.encode(usage))
    await events.send_data(b"[DONE]")
    record.finished()
    return events.response

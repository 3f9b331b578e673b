"""The battery of `verify-semantics`, sent by OpenAI's own client."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import openai

from pdserve.bench.semantics.case import Case, Json, Outcome
from pdserve.bench.semantics.sender import without_volatile
from pdserve.bench.semantics.streams import merge_completion, merge_response

Create = Callable[..., Awaitable[Any]]


def creators(client: openai.AsyncOpenAI) -> dict[str, Create]:
    """The methods of the client, by path."""
    return {
        "/v1/completions": client.completions.create,
        "/v1/chat/completions": client.chat.completions.create,
        "/v1/responses": client.responses.create,
    }


def fits_client(case: Case) -> bool:
    """Whether the client has a method for the request; it sends no broken JSON."""
    return isinstance(case.body, dict) and case.path in ("/v1/completions", "/v1/chat/completions", "/v1/responses")


async def send_all(client: openai.AsyncOpenAI, cases: Sequence[Case], *, num_at_once: int) -> list[Outcome]:
    """The outcomes in the order of the cases."""
    room = asyncio.Semaphore(num_at_once)

    async def send(case: Case) -> Outcome:
        async with room:
            return await _send(client, case)

    return list(await asyncio.gather(*map(send, cases)))


async def _send(client: openai.AsyncOpenAI, case: Case) -> Outcome:
    create = creators(client)[case.path]
    try:
        answer = await create(**_arguments(create, case.body))
        found = await _merged(case, answer) if case.streams else answer.to_dict(mode="json")
    except openai.APIStatusError as error:
        return Outcome(status=error.status_code, answer={"error": error.body})
    return Outcome(status=200, answer=without_volatile(found))


def _arguments(create: Create, body: Any) -> Json:
    """Fields that OpenAI does not have go beside the others, as its users send them."""
    known = inspect.signature(create).parameters
    arguments = {name: value for name, value in body.items() if name in known}
    return {**arguments, "extra_body": {name: value for name, value in body.items() if name not in known}}


async def _merged(case: Case, stream: Any) -> Json:
    chunks = [chunk.to_dict(mode="json") async for chunk in stream]
    return merge_response(chunks) if case.path == "/v1/responses" else merge_completion(chunks)

"""Clients that leave: soon nothing is left of their requests, and later ones are right (rule H7)."""

import asyncio

import pytest
from tests.process.deployment_under_test import Running, token_ids_in
from tests.process.gateway_under_test import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

STARTED_TIMEOUT_S = 30.0


async def until_pushed(running: Running, *, worker: str, more_than: float) -> None:
    """Wait until KV of a prompt is on its way, while more of it is still to be computed."""
    await until(
        lambda: running.metric("pdserve:bytes_pushed_total", worker=worker),
        lambda num_bytes: num_bytes > more_than,
        timeout_s=STARTED_TIMEOUT_S,
    )


async def test_client_that_leaves_amid_the_prefill_leaves_nothing(apart: Running, text_ids: list[int]) -> None:
    pushed = await apart.metric("pdserve:bytes_pushed_total", worker="prefill-0")
    cancelled = await apart.metric("pdserve:handoffs_total", worker="decode-0", outcome="cancelled")
    request = asyncio.create_task(apart.complete(text_ids * 2, max_tokens=4))
    await until_pushed(apart, worker="prefill-0", more_than=pushed)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await apart.until_idle()
    assert await apart.metric("pdserve:handoffs_total", worker="decode-0", outcome="cancelled") == cancelled + 1


async def test_client_that_leaves_amid_the_stream_leaves_nothing(apart: Running, text_ids: list[int]) -> None:
    cancelled = await apart.metric("pdserve:requests_cancelled_total")
    before = await apart.complete(text_ids[:70], max_tokens=12)
    stream = await apart.stream(text_ids[:70], max_tokens=2000)
    first = await anext(stream)
    await stream.close()
    assert token_ids_in(first.choices[0]) == before.token_ids[:1]
    await apart.until_idle()
    assert await apart.metric("pdserve:requests_cancelled_total") == cancelled + 1
    assert await apart.complete(text_ids[:70], max_tokens=12) == before


async def test_clients_that_leave_while_others_stay_disturb_no_answer(apart: Running, text_ids: list[int]) -> None:
    alone = await apart.complete(text_ids[20:150], max_tokens=16)
    leaving = [asyncio.create_task(apart.complete(text_ids[start:], max_tokens=50)) for start in (1, 2, 3)]
    staying = asyncio.create_task(apart.complete(text_ids[20:150], max_tokens=16))
    pushed = await apart.metric("pdserve:bytes_pushed_total", worker="prefill-0")
    await until_pushed(apart, worker="prefill-0", more_than=pushed)
    for request in leaving:
        request.cancel()
    await asyncio.wait(leaving)
    assert await staying == alone
    await apart.until_idle()

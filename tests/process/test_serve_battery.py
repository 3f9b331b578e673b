"""The whole battery: OpenAI's client at a disaggregated server against plain HTTP at a colocated one."""

import asyncio

import pytest
from tests.process.deployment_under_test import API_KEY, Running
from tests.process.openai_battery import fits_client, send_all

from pdserve.bench.handoff_check import NATURAL_TEXT
from pdserve.bench.semantics.battery import battery
from pdserve.bench.semantics.comparison import differences
from pdserve.bench.semantics.completions import Texts
from pdserve.bench.semantics.sender import Sender
from pdserve.model.source import ModelSource
from pdserve.text.tokenizer import Tokenizer

NUM_AT_ONCE = 6

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(400)]


async def test_battery_by_the_openai_client_apart_equals_plain_http_colocated(
    apart: Running, colocated: Running, model: ModelSource
) -> None:
    texts = Texts.of(NATURAL_TEXT.read_text(), Tokenizer.load(model.dir))
    cases = [case for case in battery(texts) if fits_client(case)]
    whole = [case for case in cases if not case.streams]
    sender = Sender(colocated.session, colocated.url, api_key=API_KEY)
    expected, found = await asyncio.gather(
        sender.send_all(whole, num_at_once=NUM_AT_ONCE), send_all(apart.client, cases, num_at_once=NUM_AT_ONCE)
    )
    assert len(cases) >= 60
    assert differences(cases, {"apart": found}) == []
    found_whole = [outcome for case, outcome in zip(cases, found, strict=True) if not case.streams]
    assert differences(whole, {"colocated": expected, "apart": found_whole}) == []

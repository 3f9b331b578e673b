"""`pdserve plan --from`: what it reads of a real gateway, and of what is none."""

import asyncio

import pytest
from tests.process.gateway_under_test import gateway, until
from tests.process.scripted_worker import answering, join_message, joined

from pdserve.cli.plan_live import LoadReader
from pdserve.errors import ConfigError
from pdserve.planner.live import seen_load


async def test_load_of_a_gateway_is_that_of_the_requests_it_answered() -> None:
    async with gateway() as running, joined(running.url, join_message("d0"), answering(["Hello", ", ", "you"])):
        reader, stop = LoadReader(running.url, 600.0), asyncio.Event()

        async def read() -> int:
            return len(reader.readings)

        reading = asyncio.create_task(reader.run(stop))
        await until(read, lambda num_readings: num_readings > 0)
        for _ in range(3):
            await running.client().completions.create(model="smol", prompt="four", max_tokens=8)
        await running.until_idle()
        stop.set()
        await reading
        seen = seen_load(reader.readings)
        assert reader.was_stopped
        assert (seen.num_answered, seen.prompts.mean, seen.answers.mean) == (3, 4.0, 3.0)
        assert {(request.num_prompt_tokens, request.num_output_tokens) for request in seen.requests(9, seed=0)} == {
            (4, 3)
        }
        assert seen.rate_per_s == pytest.approx(3 / seen.window_s)


async def test_load_of_another_page_or_of_nothing_is_refused_in_one_line() -> None:
    async with gateway() as running:
        for url in (f"{running.url}/v1", f"{running.url}/health?", "http://127.0.0.1:9"):
            with pytest.raises(ConfigError) as refusal:
                await LoadReader(url, 1.0).run(asyncio.Event())
            assert "gateway" in refusal.value.message
            assert "\n" not in refusal.value.message

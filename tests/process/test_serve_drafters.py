"""Heads on hidden states, on real workers: after a handoff they guess as after a local prefill, and change no token."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.process.deployment_under_test import API_KEY, CHUNK_TOKENS, SECRET, Running, deployment

from pdserve.bench.api_client import ApiClient
from pdserve.bench.handoff_check import Guesses, Prober
from pdserve.bench.tiny_models import TINY_EAGLE_MODEL, prepare_tiny, prepare_tiny_eagle
from pdserve.config.speculation import Drafter, Speculation
from pdserve.model.source import ModelSource

PROMPT_LENGTHS = (1, 2, 17, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 9)
"""The last two have chunks that end with a page, whose last slot the head fills in the next chunk."""

NUM_TOKENS = 24


async def tokens_and_guesses(running: Running, text_ids: list[int]) -> tuple[list[tuple[int, ...]], Guesses]:
    answers = [await running.complete(text_ids[:n], max_tokens=NUM_TOKENS, ignore_eos=True) for n in PROMPT_LENGTHS]
    client = ApiClient(running.session, running.url, api_key=API_KEY)
    guesses = await Prober(client, running.session, secret=SECRET).guesses()
    return [answer.token_ids for answer in answers], guesses


@pytest.mark.parametrize(
    ("drafter", "head_dir", "prefill_tp"), [(Drafter.MTP, None, 2), (Drafter.EAGLE, prepare_tiny_eagle, 1)]
)
async def test_head_guesses_as_well_after_a_handoff_as_after_a_local_prefill(
    text_ids: list[int], drafter: Drafter, head_dir: Callable[[], Path] | None, prefill_tp: int
) -> None:
    model = ModelSource(dir=prepare_tiny(TINY_EAGLE_MODEL), name=TINY_EAGLE_MODEL)
    speculation = Speculation(drafter=drafter, model_dir=None if head_dir is None else str(head_dir()))
    async with deployment(
        model, num_prefill=1, num_decode=1, prefill_tp=prefill_tp, speculation=speculation
    ) as running:
        handed_over = await tokens_and_guesses(running, text_ids)
        assert await running.metric("pdserve:prefill_local_total", worker="decode-0") == 1  # that of one token
    async with deployment(model, num_colocated=1, speculation=speculation) as running:
        local = await tokens_and_guesses(running, text_ids)
    assert handed_over == local
    assert 0 < local[1].num_accepted < local[1].num_tried

"""Deployments that several modules share; each costs some seconds to start."""

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio
from tests.process.deployment_under_test import Running, deployment

from pdserve.bench.handoff_check import NATURAL_TEXT
from pdserve.model.source import ModelSource, resolve_model
from pdserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def model() -> ModelSource:
    """The default model, converted now if it never was."""
    return resolve_model(None)


@pytest.fixture(scope="session")
def text_ids(model: ModelSource) -> list[int]:
    """Tokens of natural text, over which a small model is sure of its choices."""
    return Tokenizer.load(model.dir).encode(NATURAL_TEXT.read_text())


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def apart(model: ModelSource) -> AsyncGenerator[Running]:
    """One prefill and one decode worker on tcp."""
    async with deployment(model, num_prefill=1, num_decode=1) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def colocated(model: ModelSource) -> AsyncGenerator[Running]:
    """One worker that does both: what answers are compared with."""
    async with deployment(model, num_colocated=1) as running:
        yield running

"""`/v1/models/NAME` as OpenAI's own client sees it."""

import openai
import pytest
from tests.process.gateway_under_test import gateway
from tests.process.scripted_worker import join_message, joined


@pytest.mark.parametrize("name", ["org/smol", "default"])
async def test_model_asked_for_by_name_is_the_served_one(name: str) -> None:
    async with gateway(model_name="org/smol") as running:
        join = join_message("d0", model_name="org/smol", max_model_len=99)
        async with joined(running.url, join):
            model = await running.client().models.retrieve(name)
            assert (model.id, model.object, model.owned_by) == (name, "model", "pdserve")
            assert (model.to_dict()["root"], model.to_dict()["max_model_len"]) == ("org/smol", 99)


async def test_model_of_another_name_is_a_404_that_names_the_known_one() -> None:
    async with gateway() as running:
        with pytest.raises(openai.NotFoundError, match="smol") as raised:
            await running.client().models.retrieve("gpt-4")
        assert raised.value.code == "model_not_found"

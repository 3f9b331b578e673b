"""Tools, reasoning and structured output through the gateway, as OpenAI's own client sees them."""

from typing import Any

import openai
import pytest
from tests.process.gateway_under_test import gateway
from tests.process.scripted_worker import answering, join_message, joined

from pdserve.gateway.formats.parser_choice import ReasoningParserChoice, ToolParserChoice

CHAT: Any = [{"role": "user", "content": "Hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
CALL = ["Well.\n<tool", '_call>\n{"name": "now", ', '"arguments": {"a"', ": 1", "}}\n</tool_call>"]


async def test_call_is_in_the_message_of_a_whole_answer() -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("d0", max_model_len=2000), answering(CALL)) as worker,
    ):
        answer = await running.client().chat.completions.create(model="smol", messages=CHAT, tools=TOOLS)
        assert answer.choices[0].finish_reason == "tool_calls"
        message = answer.choices[0].message
        assert message.content == "Well."
        assert message.tool_calls is not None and len(message.tool_calls) == 1
        call = message.tool_calls[0]
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("now", '{"a": 1}')
        assert call.id.startswith("call_")
        assert worker.generates.get_nowait().sampling.grammar is None


async def test_call_is_streamed_name_first_then_arguments() -> None:
    async with gateway() as running, joined(running.url, join_message("d0", max_model_len=2000), answering(CALL)):
        stream = await running.client().chat.completions.create(model="smol", messages=CHAT, tools=TOOLS, stream=True)
        chunks = [chunk async for chunk in stream]
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert [call.function and call.function.name for call in calls] == ["now", None, None]
        assert "".join(call.function.arguments or "" for call in calls if call.function) == '{"a": 1}'
        assert {call.index for call in calls} == {0}
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Well."
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_messages_with_calls_can_be_sent_back() -> None:
    async with (
        gateway() as running,
        joined(running.url, join_message("d0", max_model_len=2000), answering(CALL)) as worker,
    ):
        client = running.client()
        answer = await client.chat.completions.create(model="smol", messages=CHAT, tools=TOOLS)
        message: Any = answer.choices[0].message.to_dict()
        assert message["tool_calls"]
        messages: Any = [
            *CHAT,
            message,
            {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12"},
        ]
        await client.chat.completions.create(model="smol", messages=messages, max_tokens=16)
        _, second = worker.generates.get_nowait(), worker.generates.get_nowait()
        assert bytes(second.prompt_token_ids).endswith(b"</tool_call><user><tool_response>\n12\n</tool_response>")


async def test_forced_call_and_structure_reach_the_worker_as_grammars() -> None:
    async with gateway() as running, joined(running.url, join_message("d0", max_model_len=2000)) as worker:
        client = running.client()
        await client.chat.completions.create(
            model="smol", messages=CHAT, tools=TOOLS, tool_choice="required", max_tokens=16
        )
        await client.chat.completions.create(
            model="smol", messages=CHAT, response_format={"type": "json_object"}, max_tokens=16
        )
        await client.completions.create(model="smol", prompt="x", extra_body={"guided_regex": "a+"})
        await client.chat.completions.create(
            model="smol", messages=CHAT, max_tokens=16, extra_body={"skip_special_tokens": False}
        )
        asked = [worker.generates.get_nowait().sampling for _ in range(4)]
        assert [sampling.grammar is None for sampling in asked] == [False, False, False, True]
        assert '"name": "arguments_0"' in (asked[0].grammar or "")
        assert asked[3].skip_special_tokens is False


async def test_reasoning_is_beside_the_content() -> None:
    thought = answering(["<think>\nHm", ".</think>\n", "\nYes."])
    parser = ReasoningParserChoice.THINK
    async with (
        gateway(reasoning_parser=parser) as running,
        joined(running.url, join_message("d0", max_model_len=2000), thought),
    ):
        client = running.client()
        message = (await client.chat.completions.create(model="smol", messages=CHAT)).choices[0].message
        assert (message.content, message.to_dict()["reasoning_content"]) == ("Yes.", "Hm.")
        stream = await client.chat.completions.create(model="smol", messages=CHAT, stream=True)
        deltas = [chunk.choices[0].delta.to_dict() async for chunk in stream]
        assert "".join(str(delta.get("reasoning_content", "")) for delta in deltas) == "Hm."
        assert "".join(str(delta.get("content") or "") for delta in deltas) == "Yes."


async def test_schema_that_can_not_be_compiled_is_refused_by_its_place() -> None:
    schema: Any = {"type": "object", "properties": {"age": {"type": "text"}}}
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with gateway() as running, joined(running.url, join_message("d0", max_model_len=2000)) as worker:
        with pytest.raises(openai.BadRequestError) as raised:
            await running.client().chat.completions.create(model="smol", messages=CHAT, response_format=response_format)
        assert raised.value.param == "response_format.json_schema.schema.properties.age.type"
        assert worker.generates.empty()


async def test_tools_that_can_not_be_read_are_refused() -> None:
    async with (
        gateway(tool_parser=ToolParserChoice.NONE) as running,
        joined(running.url, join_message("d0", max_model_len=2000)),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            await running.client().chat.completions.create(model="smol", messages=CHAT, tools=TOOLS)
        assert (raised.value.param, raised.value.code) == ("tools", "unsupported_parameter")

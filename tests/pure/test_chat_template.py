"""What templates in the wild ask of their environment, and what they may not do."""

import json
from typing import Any

import jinja2
import pytest

from pdserve.errors import ConfigError, InvalidField
from pdserve.text import chat_template
from pdserve.text.chat_template import Arguments, ChatTemplate, Conversation

CALL = {"function": {"name": "f", "arguments": Arguments({"a": "é<", "b": [1]})}}
AS_JSON = '{"a": "é<", "b": [1]}'


def render(source: str, special_tokens: dict[str, str] | None = None, **fields: Any) -> str:
    conversation: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi", "tool_calls": [CALL]}], **fields}
    return ChatTemplate(source, special_tokens=special_tokens or {}).render(Conversation(**conversation))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) }}", "<1>"),
        ("{{ bos_token }}{{ tools is none }}{{ documents is none }}{{ nothing is defined }}", "<s>TrueTrueFalse"),
        ("    {%- if add_generation_prompt %}\n  x\n  {%- endif %}\n", "  x"),
    ],
)
def test_template_finds_what_it_asks_for(source: str, expected: str) -> None:
    assert render(source, {"bos_token": "<s>"}) == expected


@pytest.mark.parametrize(
    "source",
    ["{{ x | tojson }}", "{{ x }}", "{{ '' + x }}", "{{ x + '' }}", "{{ '' ~ x }}", "{{ x if x is mapping }}"],
)
def test_arguments_read_as_an_object_and_as_text(source: str) -> None:
    assert render("{% set x = messages[0].tool_calls[0].function.arguments %}" + source) == AS_JSON


def test_arguments_have_items() -> None:
    source = "{% for key, value in messages[0].tool_calls[0].function.arguments | items %}{{ key }}{% endfor %}"
    assert render(source) == "ab"
    assert json.dumps(Arguments({"a": 1})) == '{"a": 1}'


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ messages[0].__class__.__mro__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_template_may_not_do_harm(source: str) -> None:
    with pytest.raises(InvalidField, match="refuses these messages"):
        render(source)


def test_template_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_PROMPT_CHARS", 1000)
    with pytest.raises(InvalidField, match="over 1000 characters"):
        render("{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}")


def test_template_names_its_variables() -> None:
    source = "{% set a = 1 %}{{ a }}{{ bos_token }}{{ enable_thinking }}{{ raise_exception('') }}{{ tools }}"
    assert ChatTemplate(source, special_tokens={"bos_token": "<s>"}).variables == {"enable_thinking", "tools"}


def test_variables_do_not_take_the_place_of_messages_and_special_tokens() -> None:
    variables: dict[str, object] = {"bos_token": "x", "messages": [], "mood": "good"}
    source = "{{ bos_token }}{{ messages | length }}{{ mood }}"
    assert render(source, {"bos_token": "<s>"}, variables=variables) == "<s>1good"


def test_unfinished_message_ends_the_prompt_with_its_space() -> None:
    messages = [{"role": "assistant", "content": "Once "}]
    source = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    assert render(source, messages=messages, continues_last=True) == "[Once "


def test_template_that_is_no_jinja_says_in_which_line() -> None:
    with pytest.raises(ConfigError, match="line 2") as raised:
        ChatTemplate("\n{% if %}", special_tokens={})
    assert isinstance(raised.value.__cause__, jinja2.TemplateSyntaxError)

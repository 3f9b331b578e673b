"""Tokenizer files, chat templates and incremental detokenizing, on tiny tokenizers written here."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ConfigError, InvalidField
from pdserve.text.chat_template import Conversation
from pdserve.text.detokenizer import MAX_WINDOW_TOKENS, Detokenizer
from pdserve.text.tokenizer import Tokenizer

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "a"), ("Ã", "©")]
END_ID = 256 + len(MERGES)
TEMPLATE = """\
{% for message in messages %}
    {% if message['role'] not in ['user', 'assistant'] %}
        {{ raise_exception('no role ' + message['role']) }}
    {% endif %}
{{ message['role'] + ': ' + message['content'] + eos_token }}
{% endfor %}
{% if add_generation_prompt %}
{{ 'assistant:' -}}
{% endif %}
"""
"""Indented and on lines of its own, which must leave no trace in the prompt."""


def byte_symbols() -> list[str]:
    """What stands for byte b, which is token b: its own character where that prints, else one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def byte_level_tokenizer() -> dict[str, Any]:
    tokens = [*byte_symbols(), *("".join(merge) for merge in MERGES)]
    return {
        "version": "1.0",
        "added_tokens": [special_token(END_ID, "<end>")],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": bpe_model({token: index for index, token in enumerate(tokens)}, byte_fallback=False, merges=MERGES),
    }


def byte_fallback_tokenizer() -> dict[str, Any]:
    """As Llama 2 has it: spaces are U+2581, unknown characters are bytes, a leading space is dropped in decoding."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b"]
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    return {
        "version": "1.0",
        "added_tokens": [special_token(0, "<unk>")],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": bpe_model(
            {token: index for index, token in enumerate(tokens)}, byte_fallback=True, merges=[("▁", "a")]
        ),
    }


def bpe_model(vocabulary: dict[str, int], *, byte_fallback: bool, merges: list[tuple[str, str]]) -> dict[str, Any]:
    unknown = "<unk>" if "<unk>" in vocabulary else None
    return {
        "type": "BPE",
        "unk_token": unknown,
        "byte_fallback": byte_fallback,
        "vocab": vocabulary,
        "merges": [list(merge) for merge in merges],
    }


def special_token(token_id: int, content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": content, **flags}


def write_model(
    model_dir: Path, *, tokenizer: dict[str, Any] | None = None, files: dict[str, dict[str, Any]] | None = None
) -> Path:
    contents = {
        "tokenizer.json": tokenizer or byte_level_tokenizer(),
        "tokenizer_config.json": {"eos_token": {"content": "<end>"}, "chat_template": TEMPLATE},
        **(files or {}),
    }
    for name, content in contents.items():
        (model_dir / name).write_text(json.dumps(content), encoding="utf-8")
    return model_dir


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_model(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    files = {"tokenizer_config.json": {"eos_token": "<unk>"}}
    model_dir = tmp_path_factory.mktemp("byte_fallback")
    return Tokenizer.load(write_model(model_dir, tokenizer=byte_fallback_tokenizer(), files=files))


def cut(token_ids: Sequence[int], lengths: list[int]) -> list[list[int]]:
    parts: list[list[int]] = []
    start = 0
    for length in lengths:
        parts.append(list(token_ids[start : start + length]))
        start += length
    return [*parts, list(token_ids[start:])]


def streamed(tokenizer: Tokenizer, parts: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(part) for part in parts), detokenizer.finish()]


SINGLY = [1] * 300
LENGTHS = st.one_of(st.just(SINGLY), st.lists(st.integers(0, 5), max_size=40))
BYTES_OF_CHARACTERS = [0x80, 0x82, 0x9F, 0xC3, 0xE2, 0xF0, 0xFF, ord("a"), END_ID]


@given(
    token_ids=st.one_of(
        st.lists(st.integers(0, END_ID), max_size=40),
        st.lists(st.sampled_from(BYTES_OF_CHARACTERS), max_size=200),
        st.lists(st.sampled_from([0x80, 0x9F, 0xE2, 0xF0]), min_size=MAX_WINDOW_TOKENS, max_size=250),
    ),
    lengths=LENGTHS,
)
@settings(deadline=None)
def test_text_detokenized_in_pieces_equals_the_whole(
    byte_level: Tokenizer, token_ids: list[int], lengths: list[int]
) -> None:
    """Any bytes at all, UTF-8 or not."""
    assert "".join(streamed(byte_level, cut(token_ids, lengths))) == byte_level.decode(token_ids)


@given(text=st.text(alphabet="ahel é你🙂\ufffd", max_size=30), lengths=LENGTHS)
@settings(deadline=None)
def test_text_detokenized_pieces_hold_whole_characters(byte_level: Tokenizer, text: str, lengths: list[int]) -> None:
    pieces = streamed(byte_level, cut(byte_level.encode(text), lengths))
    assert "".join(pieces) == text
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@given(text=st.text(alphabet="ab é你🙂", max_size=20), lengths=LENGTHS)
@settings(deadline=None)
def test_text_detokenized_with_byte_fallback_keeps_spaces(
    byte_fallback: Tokenizer, text: str, lengths: list[int]
) -> None:
    token_ids = byte_fallback.encode(text)
    assert "".join(streamed(byte_fallback, cut(token_ids, lengths))) == byte_fallback.decode(token_ids) == text


def test_text_detokenizer_holds_a_character_until_it_is_complete(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    first, *middle, last = byte_level.encode("🙂")
    assert [detokenizer.add([token_id]) for token_id in [first, *middle]] == [""] * 3
    assert detokenizer.add([last]) == "🙂"
    assert detokenizer.add([END_ID]) == ""
    assert detokenizer.add([first]) == ""
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("num_garbage", range(MAX_WINDOW_TOKENS - 5, MAX_WINDOW_TOKENS + 5))
def test_text_detokenizer_full_of_garbage_still_waits_for_a_character(byte_level: Tokenizer, num_garbage: int) -> None:
    token_ids = [0x80] * num_garbage + byte_level.encode("🙂")
    assert "".join(streamed(byte_level, cut(token_ids, SINGLY))) == "\ufffd" * num_garbage + "🙂"


class CountingTokenizer(Tokenizer):
    """Counts the tokens that are decoded, again or not."""

    num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


@pytest.mark.parametrize(("token_id", "most_per_token"), [(ord("a"), 4), (0x80, 2 * MAX_WINDOW_TOKENS)])
def test_text_detokenizer_cost_is_linear_in_the_tokens(tmp_path: Path, token_id: int, most_per_token: int) -> None:
    tokenizer = CountingTokenizer.load(write_model(tmp_path))
    assert isinstance(tokenizer, CountingTokenizer)
    detokenizer = Detokenizer(tokenizer)
    for _ in range(1_000):
        detokenizer.add([token_id])
    assert tokenizer.num_decoded <= 1_000 * most_per_token


def test_text_tokenizer_reads_size_and_special_tokens(byte_level: Tokenizer) -> None:
    assert byte_level.vocab_size == END_ID + 1
    assert byte_level.special_token_ids == {END_ID}
    assert byte_level.encode("hell é<end>")[-1] == END_ID
    assert byte_level.decode(byte_level.encode("hell é<end>")) == "hell é"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {END_ID}),
        ({"generation_config.json": {"eos_token_id": [3, 4]}}, {3, 4, END_ID}),
        ({"generation_config.json": {"eos_token_id": 3}, "config.json": {"eos_token_id": 5}}, {3, END_ID}),
        ({"config.json": {"eos_token_id": 5}, "tokenizer_config.json": {"eos_token": None}}, {5}),
    ],
)
def test_text_eos_tokens_come_from_both_configs(
    tmp_path: Path, files: dict[str, dict[str, Any]], expected: set[int]
) -> None:
    assert Tokenizer.load(write_model(tmp_path, files=files)).eos_token_ids == expected


def chat_tokens(
    tokenizer: Tokenizer, messages: list[dict[str, str]], *, add_generation_prompt: bool = True
) -> list[int]:
    conversation = Conversation(messages=messages, add_generation_prompt=add_generation_prompt)
    return tokenizer.encode(tokenizer.render_chat(conversation), add_special_tokens=False)


def test_text_chat_template_renders_with_special_tokens(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hell"}, {"role": "assistant", "content": "a"}]
    expected = byte_level.encode("user: hell<end>\nassistant: a<end>\nassistant:")
    assert chat_tokens(byte_level, messages) == expected
    assert expected.count(END_ID) == 2


def test_text_chat_without_generation_prompt_ends_with_its_last_message(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hell"}]
    token_ids = chat_tokens(byte_level, messages, add_generation_prompt=False)
    assert byte_level.decode_verbatim(token_ids).rstrip() == "user: hell<end>"
    assert byte_level.decode(token_ids).rstrip() == "user: hell"


def test_text_chat_prompt_has_no_bos_but_that_of_its_template(tmp_path: Path) -> None:
    prefix = [{"SpecialToken": {"id": "<end>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    adds_bos = {
        "type": "TemplateProcessing",
        "single": prefix,
        "pair": [*prefix, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<end>": {"id": "<end>", "ids": [END_ID], "tokens": ["<end>"]}},
    }
    write_model(tmp_path, tokenizer={**byte_level_tokenizer(), "post_processor": adds_bos})
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a") == [END_ID, ord("a")]
    assert tokenizer.encode("a", add_special_tokens=False) == [ord("a")]
    assert chat_tokens(tokenizer, [{"role": "user", "content": "a"}]) == [ord("a")]


def test_text_chat_template_file_goes_before_the_config(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content | tojson }}", encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(chat_tokens(tokenizer, [{"role": "user", "content": "<é>"}])) == '"<é>"'


def test_text_chat_template_named_default_is_taken_of_several(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    files = {"tokenizer_config.json": {"eos_token": "<end>", "chat_template": named}}
    tokenizer = Tokenizer.load(write_model(tmp_path, files=files))
    assert tokenizer.decode(chat_tokens(tokenizer, [])) == "a"
    assert tokenizer.render_chat(Conversation(messages=[], tools=[{"type": "function"}])) == "b"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "is unsafe"),
    ],
)
def test_text_chat_template_that_fails_blames_the_messages(tmp_path: Path, template: str, message: str) -> None:
    files = {"tokenizer_config.json": {"eos_token": "<end>", "chat_template": template}}
    tokenizer = Tokenizer.load(write_model(tmp_path, files=files))
    with pytest.raises(InvalidField, match=f"refuses these messages: .*{message}") as caught:
        chat_tokens(tokenizer, [{"role": "user", "content": "a"}])
    assert caught.value.param == "messages"


def test_text_chat_template_reason_reaches_the_client(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidField, match="no role king"):
        chat_tokens(byte_level, [{"role": "king", "content": "a"}])


def test_text_model_without_chat_template_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_model(tmp_path, files={"tokenizer_config.json": {"eos_token": "<end>"}}))
    assert tokenizer.chat_template is None
    with pytest.raises(ConfigError, match="no chat template"):
        chat_tokens(tokenizer, [{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "can't be read"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", "[]", "does not hold a JSON object"),
        ("tokenizer_config.json", '{"eos_token": "<end>", "chat_template": "{% if %}"}', "not valid Jinja: line 1"),
        ("tokenizer_config.json", '{"chat_template": 3}', "neither a text nor named texts"),
        ("tokenizer_config.json", "{}", "no end-of-sequence token"),
    ],
)
def test_text_model_files_that_are_broken_are_named(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    path = write_model(tmp_path) / name
    path.unlink()
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(tmp_path)

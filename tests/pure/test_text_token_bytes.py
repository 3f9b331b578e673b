"""The bytes of single tokens: together they are those of the text."""

import functools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.model.source import resolve_model
from pdserve.text.token_bytes import bytes_of_token
from pdserve.text.tokenizer import Tokenizer


@functools.cache
def default_tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model(None).dir)


@given(text=st.text(max_size=30))
@example(text="naïve 🦜 日本語 <|im_end|><0x0A>\n")
def test_bytes_of_the_tokens_together_are_those_of_the_text(text: str) -> None:
    """Of the text that the tokens have: this vocabulary lacks some control characters."""
    tokenizer = default_tokenizer()
    token_ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode(errors="replace") == tokenizer.decode_verbatim(
        token_ids
    )


def test_bytes_of_tokens_that_are_parts_of_a_character_make_it_up() -> None:
    tokenizer = default_tokenizer()
    token_ids = tokenizer.encode("\U0001f99c")
    assert len(token_ids) > 1
    assert b"".join(map(tokenizer.token_bytes, token_ids)) == "\U0001f99c".encode()


def test_bytes_of_a_token_that_there_is_not_are_none() -> None:
    tokenizer = default_tokenizer()
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


@pytest.mark.parametrize(
    ("piece", "text", "expected"),
    [
        ("Ġthe", " the", b" the"),
        ("ðŁ", "\ufffd", b"\xf0\x9f"),
        ("<0x0A>", "\n", b"\n"),
        ("<0xE2>", "\ufffd", b"\xe2"),
        ("<0x0A>", "<0x0A>", b"<0x0A>"),
        ("▁the", "the", b" the"),
        ("▁the", " the", b" the"),
        ("é", "é", "é".encode()),
        ("日", "日", "日".encode()),
        ("</s>", "</s>", b"</s>"),
    ],
)
def test_bytes_of_a_token_of_each_kind_of_vocabulary(piece: str, text: str, expected: bytes) -> None:
    assert bytes_of_token(piece, text) == expected

"""A tokenizer whose tokens are the letters: token 0 is "a"; the last one, a special token, ends the text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.text.tokenizer import Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
EOS = len(LETTERS)
EOS_TEXT = "<end>"


@dataclass(frozen=True, slots=True)
class Encoding:
    ids: list[int]


@dataclass(frozen=True, slots=True)
class AddedToken:
    special: bool


class LetterCore:
    def encode(self, sequence: str, *, add_special_tokens: bool) -> Encoding:
        del add_special_tokens
        return Encoding([LETTERS.index(letter) for letter in sequence])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        eos_text = "" if skip_special_tokens else EOS_TEXT
        return "".join(eos_text if token_id == EOS else LETTERS[token_id % len(LETTERS)] for token_id in ids)

    def token_to_id(self, token: str) -> int | None:
        return LETTERS.index(token)

    def id_to_token(self, id: int) -> str | None:
        return LETTERS[id]

    def get_vocab_size(self, *, with_added_tokens: bool) -> int:
        del with_added_tokens
        return EOS + 1

    def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        return {EOS: AddedToken(special=True)}

    def to_str(self) -> str:
        return "{}"


def letter_tokenizer() -> Tokenizer:
    return Tokenizer(LetterCore(), eos_token_ids=frozenset({EOS}))

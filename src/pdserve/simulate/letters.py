"""A tokenizer whose tokens are letters: no request of the world is judged by its text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.simulate.model import VOCABULARY
from pdserve.text.tokenizer import Tokenizer

FIRST_LETTER = ord("0")


@dataclass(frozen=True, slots=True)
class Encoding:
    ids: list[int]


@dataclass(frozen=True, slots=True)
class AddedToken:
    special: bool


class LetterCore:
    def encode(self, sequence: str, *, add_special_tokens: bool) -> Encoding:
        del add_special_tokens
        return Encoding([ord(letter) - FIRST_LETTER for letter in sequence])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return "".join(chr(FIRST_LETTER + token_id) for token_id in ids)

    def token_to_id(self, token: str) -> int | None:
        return ord(token) - FIRST_LETTER

    def id_to_token(self, id: int) -> str | None:
        return chr(FIRST_LETTER + id)

    def get_vocab_size(self, *, with_added_tokens: bool) -> int:
        del with_added_tokens
        return VOCABULARY

    def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        return {}

    def to_str(self) -> str:
        return "{}"


LETTERS = Tokenizer(LetterCore())

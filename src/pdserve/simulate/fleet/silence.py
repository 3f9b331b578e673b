"""A tokenizer whose one token has no text: of an answer only the number of its tokens matters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.text.tokenizer import Tokenizer

TOKEN_ID = 0


@dataclass(frozen=True, slots=True)
class _Encoding:
    ids: list[int]


@dataclass(frozen=True, slots=True)
class _AddedToken:
    special: bool


class _SilentCore:
    def encode(self, sequence: str, *, add_special_tokens: bool) -> _Encoding:
        del add_special_tokens
        return _Encoding([TOKEN_ID] * len(sequence))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        del ids, skip_special_tokens
        return ""

    def token_to_id(self, token: str) -> int | None:
        del token
        return None

    def id_to_token(self, id: int) -> str | None:
        del id
        return None

    def get_vocab_size(self, *, with_added_tokens: bool) -> int:
        del with_added_tokens
        return 1

    def get_added_tokens_decoder(self) -> Mapping[int, _AddedToken]:
        return {TOKEN_ID: _AddedToken(special=True)}

    def to_str(self) -> str:
        return "{}"


SILENCE = Tokenizer(_SilentCore())

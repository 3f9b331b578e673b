"""The prompt in front of an answer, as a completion with `echo` has it."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.gateway.logprobs import TokenBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    text: str
    """What the client sent, or what its tokens say."""
    token_ids: tuple[int, ...]

    def text_offsets(self, token_bytes: TokenBytes) -> list[int]:
        """The character of the text at which each token begins.

        A token whose bytes do not come next in the text takes none of it: one that the tokenizer put around the
        client's text. The space that some tokenizers put in front of a text is no part of it either.
        """
        encoded = self.text.encode()
        starts = _character_of_each_byte(encoded)
        offsets: list[int] = []
        position = 0
        for token_id in self.token_ids:
            offsets.append(starts[position])
            token = token_bytes(token_id)
            if position == 0 and not encoded.startswith(token):
                token = token.removeprefix(b" ")
            if encoded.startswith(token, position):
                position += len(token)
        return offsets


def _character_of_each_byte(encoded: bytes) -> Sequence[int]:
    """With one more, of the end."""
    characters: list[int] = []
    num_begun = 0
    for byte in encoded:
        num_begun += byte & 0xC0 != 0x80
        characters.append(num_begun - 1)
    return [*characters, num_begun]

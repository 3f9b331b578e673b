"""The tokenizer as the gateway sees it; implemented by `pdserve.text.tokenizer`."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from pdserve.text.chat_template import ChatTemplate, Conversation


class GatewayTokenizer(Protocol):
    """Threads: called from worker threads, one call at a time each."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Texts of the special tokens, as `decode_verbatim` gives them, to their ids."""
        ...

    @property
    def as_json(self) -> str:
        """What llguidance makes its tokenizer of: the content of a tokenizer.json."""
        ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode_verbatim(self, token_ids: Sequence[int]) -> str:
        """The text, with that of special tokens."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, perhaps a part of a character."""
        ...

    def render_chat(self, conversation: Conversation) -> str:
        """The prompt, with all its special tokens.

        Raises: `InvalidField` when the template refuses the messages, `ConfigError` without a template.
        """
        ...

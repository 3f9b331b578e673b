"""The tokenizer as the gateway sees it; implemented by `pdserve.text.tokenizer`."""

from collections.abc import Sequence
from typing import Protocol


class GatewayTokenizer(Protocol):
    """Threads: called from worker threads, one call at a time each."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode_verbatim(self, token_ids: Sequence[int]) -> str:
        """The text, with that of special tokens."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, perhaps a part of a character."""
        ...

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> list[int]:
        """Raises: `InvalidField` when the template refuses the messages, `ConfigError` without a template."""
        ...

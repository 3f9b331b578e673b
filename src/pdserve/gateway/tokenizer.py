"""The tokenizer as the gateway sees it; implemented by `pdserve.text.tokenizer`."""

from typing import Protocol


class GatewayTokenizer(Protocol):
    """Threads: called from worker threads, one call at a time each."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        """Raises: `InvalidField` when the template refuses the messages, `ConfigError` without a template."""
        ...

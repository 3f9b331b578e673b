"""The tokenizer of a model directory, as Hugging Face lays it out."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import tokenizers

from pdserve.errors import ConfigError
from pdserve.text.chat_template import ChatTemplate, Conversation
from pdserve.text.token_bytes import bytes_of_token

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
"""What chat templates may name."""


class _Encoding(Protocol):
    @property
    def ids(self) -> list[int]: ...


class _AddedToken(Protocol):
    @property
    def special(self) -> bool: ...


class TokenizerCore(Protocol):
    """What we use of `tokenizers.Tokenizer`, whose own stubs carry no types."""

    def encode(self, sequence: str, *, add_special_tokens: bool) -> _Encoding: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def token_to_id(self, token: str) -> int | None: ...

    def id_to_token(self, id: int) -> str | None: ...

    def get_vocab_size(self, *, with_added_tokens: bool) -> int: ...

    def get_added_tokens_decoder(self) -> Mapping[int, _AddedToken]: ...

    def to_str(self) -> str: ...


class Tokenizer:
    """Text to token ids and back.

    Threads: any number at once; nothing changes after loading.
    """

    def __init__(
        self,
        core: TokenizerCore,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._core = core
        self.chat_template = chat_template
        """None: the model is no chat model."""
        self.eos_token_ids = eos_token_ids
        """Tokens that end an answer: those of the generation config and the tokenizer's own."""
        self.vocab_size = core.get_vocab_size(with_added_tokens=True)
        self.special_token_ids = frozenset(
            token_id for token_id, token in core.get_added_tokens_decoder().items() if token.special
        )
        """Tokens without text: `decode` leaves them out."""

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """The tokenizer of a model directory; without a chat template when there is none, as with base models.

        Raises: `ConfigError` when another file is missing, or one is broken.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{model_dir} has no tokenizer.json: give the directory of a model with a fast tokenizer")
        try:
            core = cast(TokenizerCore, tokenizers.Tokenizer.from_file(str(path)))  # pyright: ignore[reportUnknownMemberType]
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} can't be read: {error}") from error
        config = _read_json(model_dir / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        chat_template = _chat_template(_template_sources(model_dir, config), special_tokens)
        return cls(core, eos_token_ids=_eos_token_ids(core, model_dir, special_tokens), chat_template=chat_template)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Texts of the special tokens, as `decode_verbatim` gives them, to their ids."""
        return {self.decode_verbatim([token_id]): token_id for token_id in self.special_token_ids}

    @property
    def as_json(self) -> str:
        """The content of a tokenizer.json."""
        return self._core.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt, by default with those that the model wants around one (such as BOS)."""
        return self._core.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return self._core.decode(token_ids, skip_special_tokens=True)

    def decode_verbatim(self, token_ids: Sequence[int]) -> str:
        """The text with that of special tokens, as in `<|im_end|>`."""
        return self._core.decode(token_ids, skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, perhaps a part of a character; nothing for a token that there is not."""
        piece = self._core.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        return b"" if piece is None else bytes_of_token(piece, self.decode_verbatim([token_id]))

    def render_chat(self, conversation: Conversation) -> str:
        """The prompt, to be encoded without special tokens: it has those that it wants.

        Raises: `InvalidField` when the template refuses the messages; `ConfigError` without a template.
        """
        template = self.chat_template
        if template is None:
            raise ConfigError(
                "the model has no chat template: use completions, or add chat_template.jinja to its files"
            )
        return (template.with_tools if conversation.tools else template).render(conversation)


def _read_json(path: Path) -> Mapping[str, object]:
    """An object of a JSON file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return cast("dict[str, object]", content)


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Names to texts. A token is written as its text or as an object with the text as `content`."""
    texts: dict[str, str] = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = config.get(name)
        if isinstance(token, dict):
            token = cast("dict[str, object]", token).get("content")
        if isinstance(token, str):
            texts[name] = token
    return texts


def _template_sources(model_dir: Path, config: Mapping[str, object]) -> Mapping[object, object]:
    """By name. The file of its own goes before the entry in the config."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    source = config.get("chat_template")
    named: dict[object, object] = {"default": source}
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in cast("list[dict[str, object]]", source)}
    if all(template is None or isinstance(template, str) for template in named.values()):
        return named
    raise ConfigError(f"chat_template in {model_dir / 'tokenizer_config.json'} is neither a text nor named texts")


def _chat_template(sources: Mapping[object, object], special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """Of several named templates, "default" is the one, and "tool_use" where there are tools."""
    source, tool_source = sources.get("default"), sources.get("tool_use")
    if not isinstance(source, str):
        return None
    with_tools = ChatTemplate(tool_source, special_tokens=special_tokens) if isinstance(tool_source, str) else None
    return ChatTemplate(source, special_tokens=special_tokens, with_tools=with_tools)


def _eos_token_ids(core: TokenizerCore, model_dir: Path, special_tokens: Mapping[str, str]) -> frozenset[int]:
    path = model_dir / "generation_config.json"
    if not path.is_file():
        path = model_dir / "config.json"
    listed = _read_json(path).get("eos_token_id")
    token_ids = cast("list[object]", listed) if isinstance(listed, list) else [listed]
    if "eos_token" in special_tokens:
        token_ids = [*token_ids, core.token_to_id(special_tokens["eos_token"])]
    eos_token_ids = frozenset(token_id for token_id in token_ids if isinstance(token_id, int))
    if not eos_token_ids:
        raise ConfigError(f"no end-of-sequence token: {path} has no eos_token_id, tokenizer_config.json no eos_token")
    return eos_token_ids

"""The one model that is served, as clients name it and as it reads text."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pdserve.errors import ConfigError, InvalidField, ModelNotFound, UnsupportedField
from pdserve.gateway.chat_prompt import ChatPrompt
from pdserve.gateway.formats.model_formats import model_formats
from pdserve.gateway.formats.parser_choice import ReasoningParserChoice, ToolParserChoice
from pdserve.gateway.formats.reasoning import ReasoningStart
from pdserve.gateway.grammar_compiler import GrammarCompiler
from pdserve.gateway.structured_fields import Structure
from pdserve.gateway.tokenizer import GatewayTokenizer
from pdserve.gateway.tool_fields import schema_of
from pdserve.text.chat_template import Conversation

DEFAULT_MODEL = "default"
"""Names the one model that is served, whatever its own name."""


MAX_CACHED_TOKENS = 65_536
"""A token takes some us to look up, and an answer may name 21 of them for each that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    text: str
    """With that of special tokens."""
    token_ids: list[int]


class ServedModel:
    """Every method raises `RequestError` for what the client did wrong. The tokenizer runs in threads."""

    def __init__(
        self,
        tokenizer: GatewayTokenizer,
        *,
        name: str,
        tool_parser: ToolParserChoice = ToolParserChoice.AUTO,
        reasoning_parser: ReasoningParserChoice = ReasoningParserChoice.AUTO,
    ) -> None:
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(tokenizer)
        self.name = name
        self.formats = model_formats(
            tokenizer.chat_template,
            tokenizer.special_tokens,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )
        self.token_bytes: Callable[[int], bytes] = lru_cache(maxsize=MAX_CACHED_TOKENS)(tokenizer.token_bytes)
        """What one token stands for, perhaps a part of a character. Not in a thread."""

    def require_named(self, name: str) -> None:
        """Raises: `ModelNotFound` for the name of another model."""
        if name not in (self.name, DEFAULT_MODEL):
            raise ModelNotFound(
                f"there is no model {name!r} here; ask for {self.name!r} or {DEFAULT_MODEL!r}", param="model"
            )

    def require_known(self, token_ids: Iterable[int], *, param: str) -> None:
        """Raises: `InvalidField` for a token that the vocabulary does not have."""
        vocab_size = self._tokenizer.vocab_size
        unknown = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
        if unknown is not None:
            raise InvalidField(f"'{param}' has token id {unknown}; the vocabulary is [0, {vocab_size})", param=param)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def tokenize_chat(self, conversation: Conversation, *, param: str) -> RenderedPrompt:
        """`param` is the field that holds the messages.

        Raises: `UnsupportedField` when the model has no chat template, `InvalidField` when it refuses the messages.
        """
        try:
            return await asyncio.to_thread(self._tokenize_chat, conversation)
        except ConfigError as error:
            raise UnsupportedField(error.message, param=param) from error
        except InvalidField as error:
            raise InvalidField(error.message, param=param) from error

    async def compiled(self, structure: Structure) -> str:
        """As the sampler takes it. Raises: `InvalidField` that names the place, `CapacityError`."""
        if structure.schema is not None:
            await self._grammars.require_compiled_schema(structure.schema, param=structure.param)
        return await self._grammars.require_compiled(structure.grammar, param=structure.param)

    async def compiled_chat(
        self, chat: ChatPrompt, structure: Structure | None, start: ReasoningStart | None
    ) -> str | None:
        """The same for answers of a chat; None where anything goes."""
        if structure is not None:
            await self.compiled(structure)
        grammar = chat.grammar(None if structure is None else structure.grammar, start)
        if grammar is None:
            return None
        if (tools := chat.options.tools) is not None:
            for tool in tools.forced or tools.tools:
                await self._grammars.require_compiled_schema(schema_of(tool), param=tools.param_of(tool))
        return await self._grammars.require_compiled(grammar, param="tools" if structure is None else structure.param)

    async def detokenize(self, token_ids: Sequence[int], *, param: str) -> str:
        """The text with that of special tokens, so that tokenizing it without adding any gives the tokens again."""
        self.require_known(token_ids, param=param)
        return await asyncio.to_thread(self._tokenizer.decode_verbatim, token_ids)

    def _tokenize_chat(self, conversation: Conversation) -> RenderedPrompt:
        text = self._tokenizer.render_chat(conversation)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return RenderedPrompt(text=text, token_ids=token_ids)

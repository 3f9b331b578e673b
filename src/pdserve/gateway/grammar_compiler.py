"""Grammars are compiled before their request is dispatched, so that what is wrong with one is the client's to know."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pdserve.errors import CapacityError, InvalidField
from pdserve.gateway.grammar import Grammar, Schema, of_schema
from pdserve.gateway.schema_fault import place_of_fault
from pdserve.gateway.tokenizer import GatewayTokenizer
from pdserve.sampling import MAX_GRAMMAR_BYTES

NUM_REMEMBERED = 256
"""Clients send the same few grammars again and again."""

NUM_THREADS = 2
"""For grammars alone: those that take long must not keep prompts from being tokenized."""

COMPILE_TIMEOUT_S = 10.0
"""For a grammar's turn, and to compile it. llguidance's own limits end each within a second."""

MAX_SCHEMA_KEYS = 4000
"""A schema with 2,000 properties takes 0.6 s to compile, one with 5,000 properties 3 s: time grows with the square."""

MAX_LEXER_FUEL = 100_000
"""A tenth of llguidance's default; 300 properties with formats take less."""

MAX_PROBED_CHARS = 1024 * 1024
"""Of schemas that are compiled to find the place of what is wrong with one."""

NUM_PROBED = 4
"""Tokens of an answer that are tried: some patterns are over a limit only when they are matched."""

MAX_MESSAGE_CHARS = 500

_DEAD_END = "NoExtensionBias"
"""What llguidance says where no token may come next."""

_LIMITS = LLParserLimits(initial_lexer_fuel=MAX_LEXER_FUEL, verbose_errors=False)


class GrammarCompiler:
    """Threads: the event loop's; compiles on threads of its own."""

    def __init__(self, tokenizer: GatewayTokenizer) -> None:
        self._gateway_tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._complaint = lru_cache(maxsize=NUM_REMEMBERED)(self._complaint_of)

    async def require_compiled(self, grammar: Grammar, *, param: str) -> str:
        """The grammar as the sampler takes it; `param` is the field that asks for it.

        Raises: `InvalidField` when it can't be compiled or nothing matches it, `CapacityError` when others come first.
        """
        text = grammar.text
        if len(text.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidField(f"'{param}' is over {MAX_GRAMMAR_BYTES} bytes", param=param)
        complaint = await self._in_turn(text, None)
        if complaint is not None:
            raise InvalidField(f"'{param}' can't be compiled: {complaint[1]}", param=param)
        return text

    async def require_compiled_schema(self, schema: Schema, *, param: str) -> None:
        """Raises: `InvalidField` that names the place within the schema, `CapacityError`."""
        if _num_keys(schema) > MAX_SCHEMA_KEYS:
            raise InvalidField(f"'{param}' has more than {MAX_SCHEMA_KEYS} keys", param=param)
        complaint = await self._in_turn(of_schema(schema).text, schema)
        if complaint is not None:
            place, message = param + complaint[0], complaint[1]
            raise InvalidField(f"'{place}' can't be compiled: {message}", param=place)

    async def _in_turn(self, text: str, schema: Schema | None) -> tuple[str, str] | None:
        """The place within the schema, where there is one, and what the compiler says; None when it is content."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(COMPILE_TIMEOUT_S):
                return await loop.run_in_executor(self._executor, self._located_complaint, text, schema)
        except TimeoutError:
            raise CapacityError("too many grammars are being compiled; try again", retry_after_s=1.0) from None

    def _located_complaint(self, text: str, schema: Schema | None) -> tuple[str, str] | None:
        message = self._complaint(text)
        if message is None:
            return None
        if schema is None or _complaint_of_schema(schema) is None:
            return "", message
        max_probes = min(256, MAX_PROBED_CHARS // len(text))
        return place_of_fault(schema, _complaint_of_schema, max_probes=max_probes), message

    def _complaint_of(self, text: str) -> str | None:
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
        for _ in range(NUM_PROBED):
            if matcher.is_error():
                return _shortened(matcher.get_error())
            if matcher.is_stopped():
                break
            token_id = _first_token(matcher.compute_bitmask())
            if token_id is not None:
                matcher.consume_token(token_id)
        if matcher.is_error():
            return _shortened(matcher.get_error())
        return None

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        eos_token_ids = sorted(self._gateway_tokenizer.eos_token_ids)
        return LLTokenizer(self._gateway_tokenizer.as_json, eos_token=eos_token_ids or None)


def _complaint_of_schema(schema: Schema) -> str | None:
    """Without where a reference led."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(of_schema(schema).text, limits=_LIMITS)
    return messages[0].partition("\n  while processing")[0] if is_error else None


def _num_keys(value: object) -> int:
    if isinstance(value, dict):
        members = cast("dict[str, object]", value)
        return len(members) + sum(map(_num_keys, members.values()))
    return sum(map(_num_keys, cast("list[object]", value))) if isinstance(value, list) else 0


def _first_token(mask: bytes) -> int | None:
    for index, byte in enumerate(mask):
        if byte:
            return index * 8 + (byte & -byte).bit_length() - 1
    return None


def _shortened(message: str) -> str:
    message = message.removesuffix("<non-verbose/>").rstrip()
    if message == _DEAD_END:
        return "no answer matches it"
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."

"""Documents that a model writes under many schemas, judged by a validator that has nothing to do with the grammars."""

import asyncio
import json
from typing import Any

import msgspec

from pdserve.bench.api_client import ApiClient
from pdserve.bench.document_schemas import SCHEMAS
from pdserve.errors import ConfigError

MAX_TOKENS = 400
"""Every schema is bounded, so that its documents end before."""

NUM_AT_ONCE = 8


class DocumentCount(msgspec.Struct, frozen=True, kw_only=True):
    num_schemas: int
    num_documents: int
    num_valid: int


async def count_valid_documents(client: ApiClient, *, num_documents: int) -> DocumentCount:
    """A document a seed, the schemas in turn. Raises: `ConfigError` when `jsonschema` is not installed."""
    try:
        import jsonschema
    except ImportError as error:
        raise ConfigError("documents are validated with jsonschema: pip install jsonschema") from error
    room = asyncio.Semaphore(NUM_AT_ONCE)

    async def is_valid(seed: int) -> bool:
        schema = SCHEMAS[seed % len(SCHEMAS)]
        async with room:
            answer = await client.complete(
                "A document:\n", max_tokens=MAX_TOKENS, temperature=1.0, seed=seed, guided_json=schema
            )
        return answer.finish_reason == "stop" and _conforms(answer.text, schema, jsonschema)

    verdicts = await asyncio.gather(*map(is_valid, range(num_documents)))
    return DocumentCount(num_schemas=len(SCHEMAS), num_documents=num_documents, num_valid=sum(verdicts))


def _conforms(text: str, schema: dict[str, Any], jsonschema: Any) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True

"""The wire format is frozen beside its version: a change of any message is a change of `PROTOCOL_VERSION`.

After a deliberate change, raise `PROTOCOL_VERSION` and freeze it again by `python -m tests.policy.test_wire_schema`.
"""

import json
import re
from pathlib import Path
from typing import Any, cast

import msgspec

from pdserve.wire.cluster import GatewayToWorker, WorkerToGateway
from pdserve.wire.codec import MAX_MESSAGE_BYTES
from pdserve.wire.peer import PROTOCOL_VERSION, DecodeToPrefill, PrefillToDecode

FROZEN_PATH = Path(__file__).with_name("wire_schema.json")
DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"

PROSE = {"title", "description"}

DIRECTIONS: dict[str, Any] = {
    "decode_to_prefill": DecodeToPrefill,
    "prefill_to_decode": PrefillToDecode,
    "worker_to_gateway": WorkerToGateway,
    "gateway_to_worker": GatewayToWorker,
}


def without_prose(schema: object) -> object:
    """The schema without titles and descriptions, which are free to change."""
    if isinstance(schema, dict):
        items = cast("dict[str, object]", schema).items()
        return {key: without_prose(value) for key, value in items if key not in PROSE or not isinstance(value, str)}
    if isinstance(schema, list | tuple):
        return [without_prose(element) for element in cast("list[object]", schema)]
    return schema


def current_schema() -> dict[str, Any]:
    references, components = msgspec.json.schema_components(DIRECTIONS.values(), ref_template="#/messages/{name}")
    directions = dict(zip(DIRECTIONS, references, strict=True))
    return {
        "protocol_version": PROTOCOL_VERSION,
        "max_message_bytes": MAX_MESSAGE_BYTES,
        "directions": without_prose(directions),
        "messages": without_prose(components),
    }


def test_wire_schema_that_differs_from_the_frozen_one_needs_a_new_version() -> None:
    assert current_schema() == json.loads(FROZEN_PATH.read_text()), __doc__


def test_wire_messages_all_forbid_unknown_fields() -> None:
    open_ended = [
        name
        for name, schema in current_schema()["messages"].items()
        if schema.get("type") == "object" and schema.get("additionalProperties") is not False
    ]
    assert open_ended == []


def test_wire_document_names_every_message() -> None:
    text = DOCUMENT.read_text()
    names = [name for name, schema in current_schema()["messages"].items() if "type" in schema.get("properties", {})]
    assert len(names) > 10
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
    assert f"version {PROTOCOL_VERSION}" in text


if __name__ == "__main__":
    FROZEN_PATH.write_text(json.dumps(current_schema(), indent=1, sort_keys=True) + "\n")

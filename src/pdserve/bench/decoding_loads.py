"""What `bench-decoding` sends."""

from typing import Any

from pdserve.bench.decoding import Load
from pdserve.bench.handoff_check import NATURAL_TEXT

NUM_GRAMMAR_STREAMS = 8

LIST_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 40,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "trade": {"enum": ["sailor", "miller", "keeper", "fisher"]},
        },
        "required": ["name", "age", "trade"],
        "additionalProperties": False,
    },
}
"""Longer than any answer: no stream ends before the others."""


def speculation_loads() -> list[Load]:
    """Copying, where almost all can be guessed, and free text, where little can; one stream and four."""
    paragraphs = NATURAL_TEXT.read_text().split("\n\n")[:4]
    copies = tuple(f"{paragraph}\n\n{paragraph}\n\n{paragraph[:80]}" for paragraph in paragraphs)
    free = tuple(f"{paragraph}\n\n" for paragraph in paragraphs)
    greedy: dict[str, Any] = {"ignore_eos": True}
    seeded: dict[str, Any] = {"ignore_eos": True, "temperature": 0.8, "seed": 5}
    return [
        Load(name="copying, one stream", prompts=copies[:1], fields=greedy),
        Load(name="copying, four streams", prompts=copies, fields=greedy),
        Load(name="free text, one stream", prompts=free[:1], fields=seeded),
        Load(name="free text, four streams", prompts=free, fields=seeded),
    ]


def grammar_loads() -> tuple[Load, Load]:
    """The same prompts without and with a grammar."""
    prompts = tuple(f"The people of Marlow, list {index}, as JSON:\n" for index in range(NUM_GRAMMAR_STREAMS))
    fields: dict[str, Any] = {"ignore_eos": True, "temperature": 0.8, "seed": 6}
    return (
        Load(name="without a grammar", prompts=prompts, fields=fields),
        Load(name="guided JSON", prompts=prompts, fields={**fields, "guided_json": LIST_SCHEMA}),
    )

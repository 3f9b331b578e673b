"""`docs/handoff.md` draws the two state tables; the drawings and the tables say the same."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from pdserve.transfer.handoff import RECEIVER_TABLE, SENDER_TABLE, Decision, Event, ReceiverState, SenderState, State

DOC = Path(__file__).resolve().parents[2] / "docs" / "handoff.md"
EDGE = re.compile(r"^\s*(\w+|\[\*\]) --> (\w+|\[\*\])(?:: (\w+))?$")

Edge = tuple[str, str, str]


def drawn_edges(text: str, *, heading: str) -> Counter[Edge]:
    """The edges of the diagram under a heading, as (before, event, after); every line of it must be one."""
    section = text.split(f"## {heading}\n", 1)[1]
    diagram = section.split("```mermaid\nstateDiagram-v2\n", 1)[1].split("```", 1)[0]
    edges: Counter[Edge] = Counter()
    for line in diagram.splitlines():
        match = EDGE.match(line)
        assert match is not None, f"not an edge of the diagram: {line!r}"
        edges[match[1], match[3] or "", match[2]] += 1
    return edges


def table_edges(
    table: Mapping[State, Mapping[Event, State | Decision]], *, initial: State, final: State
) -> Counter[Edge]:
    moves = Counter(
        (before.name, event.name, after.name)
        for before, row in table.items()
        for event, after in row.items()
        if not isinstance(after, Decision)
    )
    return moves + Counter([("[*]", "", initial.name), (final.name, "", "[*]")])


def test_receiver_diagram_equals_the_receiver_table() -> None:
    drawn = drawn_edges(DOC.read_text(), heading="The decode side")
    assert drawn == table_edges(RECEIVER_TABLE, initial=ReceiverState.GRANTED, final=ReceiverState.CLOSED)


def test_sender_diagram_equals_the_sender_table() -> None:
    drawn = drawn_edges(DOC.read_text(), heading="The prefill side")
    assert drawn == table_edges(SENDER_TABLE, initial=SenderState.QUEUED, final=SenderState.CLOSED)


def test_diagram_without_one_edge_differs_from_the_table() -> None:
    text = DOC.read_text().replace("    GRANTED --> CANCELLING: EXPIRED\n", "")
    expected = table_edges(RECEIVER_TABLE, initial=ReceiverState.GRANTED, final=ReceiverState.CLOSED)
    assert expected - drawn_edges(text, heading="The decode side") == Counter([("GRANTED", "EXPIRED", "CANCELLING")])

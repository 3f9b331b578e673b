"""Grants and answers full of nonsense: a typed error or nothing, and never a page that was not granted."""

import math
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.pure.decode_side import DecodeSide
from tests.pure.prefill_side import DECODE, LAYOUT, PREFILL, PrefillSide, hello_of
from tests.pure.wire_mutations import BOUNDARY_FLOATS, BOUNDARY_INTS

from pdserve.errors import RemoteProtocolError
from pdserve.fabric.port import PagePush
from pdserve.ids import HandoffId, Immediate, Incarnation
from pdserve.wire.codec import decode_side_codec, prefill_side_codec
from pdserve.wire.peer import Cancel, Grant, GrantRefused, HandoffStopped

OTHER = Incarnation(98)
NUM_TARGET_PAGES = hello_of(DECODE).num_pages

odd_ints = st.sampled_from(BOUNDARY_INTS) | st.integers(-2, 40)
odd_tuples = st.lists(odd_ints, max_size=14).map(tuple)
odd_fields = st.fixed_dictionaries(
    {},
    optional={
        "sender": st.sampled_from((DECODE, OTHER)),
        "receiver": st.sampled_from((PREFILL, OTHER)),
        "handoff_id": odd_ints,
        "dp_rank": odd_ints,
        "token_ids": odd_tuples,
        "num_held_tokens": odd_ints,
        "page_indices": odd_tuples,
        "immediate": odd_ints,
        "tail_slot": odd_ints,
        "timeout_s": st.sampled_from(BOUNDARY_FLOATS),
    },
)
few_odd_fields = odd_fields.map(lambda fields: dict(list(fields.items())[:2]))
handoff_ids = st.integers(1, 4)
grants = st.tuples(handoff_ids, st.integers(2, 20), st.sampled_from((0, 0, 4, 8)), few_odd_fields)
answers = st.tuples(
    st.sampled_from((PREFILL, OTHER)), st.sampled_from((PREFILL, OTHER)), st.sampled_from((DECODE, OTHER)), odd_ints
)


class Prefill:
    """A prefill worker to which a decode worker sends what it likes."""

    def __init__(self) -> None:
        self.side = PrefillSide()
        self.granted: dict[Immediate, set[int]] = {}
        """Pages that may be written to under an immediate."""

    def on_grant(self, grant: Grant) -> bool:
        """False when the connection ends by it."""
        received = prefill_side_codec().decode(prefill_side_codec().encode(grant), peer="p")
        assert received == grant or grant.timeout_s != grant.timeout_s
        num_open = self.side.role.num_open
        try:
            self.side.role.on_grant(DECODE, grant, now_ns=0)
        except RemoteProtocolError:
            assert self.side.role.num_open == num_open
            return False
        if self.side.role.num_open > num_open:
            self.granted.setdefault(grant.immediate, set()).update(grant.page_indices)
        return True

    def run_pass(self) -> None:
        if self.side.scheduler.num_running + self.side.scheduler.num_waiting:
            self.side.run_pass()
        for push in self.side.fabric.armed.values():
            assert 0 <= push.immediate < 1 << 32
            region_bytes = self.side.fabric.attached[push.target].num_bytes
            if isinstance(push, PagePush):
                pages = {int(page) for page in push.target_pages}
                assert pages <= self.granted[push.immediate]
                assert max(pages) < NUM_TARGET_PAGES
                assert LAYOUT.region_bytes(NUM_TARGET_PAGES) <= region_bytes
            else:
                assert 0 <= push.target_offset <= region_bytes - push.num_bytes

    def drain(self) -> None:
        while self.side.scheduler.num_running + self.side.scheduler.num_waiting:
            self.run_pass()
            self.side.all_pushes_end()
        self.side.all_pushes_end()
        for flush_id in list(self.side.fabric.flushes):
            self.side.role.on_fabric_event(self.side.fabric.flush_ends(flush_id), now_ns=0)


@given(steps=st.lists(grants | handoff_ids | st.none(), max_size=12))
def test_grants_with_nonsense_are_refused_or_write_to_granted_pages_alone(
    steps: list[tuple[int, int, int, dict[str, Any]] | int | None],
) -> None:
    """A step is a grant, a cancel of the handoff, or a pass."""
    worker = Prefill()
    for step in steps:
        match step:
            case None:
                worker.run_pass()
            case int():
                cancel = Cancel(sender=DECODE, receiver=PREFILL, handoff_id=HandoffId(step))
                worker.side.role.on_cancel(DECODE, cancel, now_ns=0)
            case handoff_id, num_tokens, num_held_tokens, changed:
                held = num_held_tokens if num_held_tokens < num_tokens - 1 else 0
                grant = worker.side.grant(handoff_id, num_tokens=num_tokens, num_held_tokens=held)
                if not worker.on_grant(replace(grant, **changed)):
                    worker.side.lose()
                    break
    worker.drain()
    assert worker.side.is_whole()


Answer = Callable[[Incarnation, Incarnation, HandoffId], GrantRefused | HandoffStopped]


def refusal(sender: Incarnation, receiver: Incarnation, handoff_id: HandoffId) -> GrantRefused:
    return GrantRefused(sender=sender, receiver=receiver, handoff_id=handoff_id, message="no", retry_after_s=math.nan)


def stop(sender: Incarnation, receiver: Incarnation, handoff_id: HandoffId) -> HandoffStopped:
    return HandoffStopped(sender=sender, receiver=receiver, handoff_id=handoff_id, message="stopped")


@given(answer=st.sampled_from((refusal, stop)), received=st.lists(answers, max_size=8))
def test_answers_with_nonsense_free_the_pages_of_the_handoff_they_name_alone(
    answer: Answer, received: list[tuple[Incarnation, Incarnation, Incarnation, int]]
) -> None:
    side = DecodeSide(num_pages=32)
    side.join(OTHER)
    pages_out = {grant.handoff_id: len(grant.page_indices) for grant in (side.open(), side.open(num_tokens=12))}
    for peer, sender, receiver, handoff_id in received:
        message = answer(sender, receiver, HandoffId(handoff_id))
        assert type(decode_side_codec().decode(decode_side_codec().encode(message), peer="p")) is type(message)
        side.receiver.on_message(peer, message, now_ns=0)
        if peer == sender == PREFILL and receiver != OTHER:
            pages_out.pop(HandoffId(handoff_id), None)
        assert side.pool.num_free == 32 - sum(pages_out.values())

"""What two workers compare when they meet."""

import pytest
from msgspec.structs import replace
from tests.pure.prefill_side import LAYOUT, TAIL_BYTES, hello_of

from pdserve.ids import Incarnation, WorkerId
from pdserve.transfer.identity import Identity, difference
from pdserve.wire.peer import PROTOCOL_VERSION, PeerHello

OURS = Identity(
    worker_id=WorkerId("ours"),
    incarnation=Incarnation(7),
    model_fingerprint="toy",
    layout=LAYOUT,
    num_pages=8,
    tail_slot_bytes=TAIL_BYTES,
)
THEIRS = hello_of(Incarnation(8), kv=None, tail=None)


def test_workers_that_differ_only_in_name_and_size_work_together() -> None:
    assert THEIRS.num_pages != OURS.num_pages
    assert difference(OURS, THEIRS, protocol_version=PROTOCOL_VERSION) is None


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (replace(THEIRS, model_fingerprint="other"), ("model_fingerprint", "toy", "other")),
        (replace(THEIRS, layout=replace(LAYOUT, num_layers=3)), ("layout.num_layers", "2", "3")),
        (replace(THEIRS, layout=replace(LAYOUT, num_kv_heads=3)), ("layout.num_kv_heads", "1", "3")),
        (replace(THEIRS, layout=replace(LAYOUT, head_dim=4)), ("layout.head_dim", "2", "4")),
        (replace(THEIRS, layout=replace(LAYOUT, page_slots=8)), ("layout.page_slots", "4", "8")),
        (replace(THEIRS, layout=replace(LAYOUT, dtype="float16")), ("layout.dtype", "float32", "float16")),
        (replace(THEIRS, tail_slot_bytes=128), ("tail_slot_bytes", "64", "128")),
        (replace(THEIRS, protocol_version=99), ("protocol_version", str(PROTOCOL_VERSION), "99")),
    ],
)
def test_first_difference_is_named_with_both_values(theirs: PeerHello, expected: tuple[str, str, str]) -> None:
    assert difference(OURS, theirs, protocol_version=PROTOCOL_VERSION) == expected

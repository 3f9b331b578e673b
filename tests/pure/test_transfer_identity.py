"""What two workers compare when they meet: everything but the number of ranks, which must only divide the heads."""

import dataclasses

import pytest
from msgspec.structs import replace
from tests.pure.prefill_side import LAYOUT, ONE_RANK, TAIL_BYTES, hello_of

from pdserve.ids import Incarnation, WorkerId
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.transfer.identity import Identity, difference
from pdserve.wire.peer import PROTOCOL_VERSION, PeerHello

THEIRS = hello_of(Incarnation(8))


def ours(num_ranks: int = 1, layout: KvLayout = LAYOUT) -> Identity:
    return Identity(
        worker_id=WorkerId("ours"),
        incarnation=Incarnation(7),
        model_fingerprint="toy",
        sharding=KvSharding(layout=layout, num_ranks=num_ranks),
        num_pages=8,
        tail_slot_bytes=TAIL_BYTES,
    )


def with_ranks(num_ranks: int, layout: KvLayout = LAYOUT) -> PeerHello:
    return replace(THEIRS, sharding=KvSharding(layout=layout, num_ranks=num_ranks))


def with_layout(layout: KvLayout) -> PeerHello:
    return replace(THEIRS, sharding=replace(ONE_RANK, layout=layout))


def difference_from(identity: Identity, theirs: PeerHello) -> tuple[str, str, str] | None:
    return difference(identity, theirs, protocol_version=PROTOCOL_VERSION)


def test_workers_that_differ_only_in_name_and_size_work_together() -> None:
    assert THEIRS.num_pages != ours().num_pages
    assert difference_from(ours(), THEIRS) is None


@pytest.mark.parametrize("our_ranks", [1, 2, 4])
@pytest.mark.parametrize("their_ranks", [1, 2, 4, 6])
def test_workers_of_any_number_of_ranks_that_divides_the_heads_work_together(our_ranks: int, their_ranks: int) -> None:
    assert difference_from(ours(our_ranks), with_ranks(their_ranks)) is None


def test_workers_of_one_latent_head_work_together_with_any_number_of_ranks() -> None:
    latent = replace(LAYOUT, num_kv_heads=1, num_planes=1)
    assert difference_from(ours(3, latent), with_ranks(5, latent)) is None


@pytest.mark.parametrize("num_ranks", [3, 5, 0, -2])
def test_number_of_ranks_that_divides_no_heads_is_a_difference(num_ranks: int) -> None:
    found = difference_from(ours(2), with_ranks(num_ranks))
    assert found is not None
    field, our_value, their_value = found
    assert (field, our_value) == ("tensor_parallel_size", "2")
    assert their_value == (
        f"tensor parallel size {num_ranks} neither divides {LAYOUT.num_kv_heads} KV heads nor is a multiple of them"
    )


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (replace(THEIRS, model_fingerprint="other"), ("model_fingerprint", "toy", "other")),
        (with_layout(replace(LAYOUT, num_layers=3)), ("layout.num_layers", "2", "3")),
        (with_layout(replace(LAYOUT, num_kv_heads=3)), ("layout.num_kv_heads", "2", "3")),
        (with_layout(replace(LAYOUT, head_dim=4)), ("layout.head_dim", "2", "4")),
        (with_layout(replace(LAYOUT, page_slots=8)), ("layout.page_slots", "4", "8")),
        (with_layout(replace(LAYOUT, dtype="float16")), ("layout.dtype", "float32", "float16")),
        (with_layout(replace(LAYOUT, num_planes=1)), ("layout.num_planes", "2", "1")),
        (replace(THEIRS, tail_slot_bytes=128), ("tail_slot_bytes", "64", "128")),
        (replace(THEIRS, protocol_version=99), ("protocol_version", str(PROTOCOL_VERSION), "99")),
    ],
)
def test_first_difference_is_named_with_both_values(theirs: PeerHello, expected: tuple[str, str, str]) -> None:
    assert difference_from(ours(), theirs) == expected


@pytest.mark.parametrize("theirs", [None, replace(LAYOUT, num_layers=3)])
def test_other_drafter_is_a_difference_that_says_how_to_start_both(theirs: KvLayout | None) -> None:
    """Its weights make another fingerprint too, which would say less."""
    identity = dataclasses.replace(ours(), draft_layout=LAYOUT)
    found = difference_from(identity, replace(THEIRS, draft_layout=theirs, model_fingerprint="other"))
    assert found is not None
    field, our_value, their_value = found
    assert (field, our_value) == ("draft_layout", str(LAYOUT))
    assert their_value.startswith("no drafter" if theirs is None else str(theirs))
    assert their_value.endswith("start both workers with the same model and the same --speculate")


def test_same_drafter_is_no_difference() -> None:
    identity = dataclasses.replace(ours(), draft_layout=LAYOUT)
    assert difference_from(identity, replace(THEIRS, draft_layout=LAYOUT)) is None


def test_layout_is_compared_before_the_number_of_ranks_that_must_divide_its_heads() -> None:
    found = difference_from(ours(2), with_ranks(3, replace(LAYOUT, num_kv_heads=3)))
    assert found == ("layout.num_kv_heads", "2", "3")

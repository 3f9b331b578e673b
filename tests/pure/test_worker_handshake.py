"""What two workers say of themselves when they meet, and what makes one refuse the other."""

import dataclasses
import math

import pytest
from msgspec.structs import replace
from tests.pure.decode_side import DECODE, DecodeSide
from tests.pure.prefill_side import LAYOUT, TAIL_BYTES
from tests.pure.scripted_fabric import ScriptedFabric

from pdserve.config.role import Role
from pdserve.config.worker import WorkerSettings
from pdserve.ids import Incarnation, WorkerId
from pdserve.kv.shard import KvSharding
from pdserve.transfer.identity import Identity
from pdserve.wire.peer import PROTOCOL_VERSION, PeerHello, PeerRefused
from pdserve.worker.handshake import hello, mismatch

SETTINGS = WorkerSettings(name="", role=Role.DECODE, join_url="", model_dir="", model_name="", lease_s=8.0)


def identity(incarnation: Incarnation, *, num_ranks: int) -> Identity:
    return Identity(
        worker_id=WorkerId(f"worker-{incarnation}"),
        incarnation=incarnation,
        model_fingerprint="toy",
        sharding=KvSharding(layout=LAYOUT, num_ranks=num_ranks),
        num_pages=8,
        tail_slot_bytes=TAIL_BYTES,
    )


PREFILL = identity(Incarnation(2), num_ranks=2)
SIDE = DecodeSide(num_dp_ranks=3, sharding=KvSharding(layout=LAYOUT, num_ranks=4))
THEIRS = hello(identity(DECODE, num_ranks=4), SETTINGS, SIDE.fabric, regions=SIDE.receiver.expose())


def with_layout(**changed: int | str) -> PeerHello:
    return replace(THEIRS, sharding=replace(THEIRS.sharding, layout=replace(LAYOUT, **changed)))


def test_hello_of_a_decode_worker_says_its_sharding_and_the_regions_of_all_its_ranks() -> None:
    assert (THEIRS.protocol_version, THEIRS.worker_id, THEIRS.incarnation) == (PROTOCOL_VERSION, "worker-1", DECODE)
    assert THEIRS.sharding.num_ranks == 4
    assert [len(regions.kv) for regions in THEIRS.regions] == [4, 4, 4]
    assert (THEIRS.lease_s, THEIRS.fabric_provider) == (8.0, "scripted")


def test_hello_of_a_prefill_worker_offers_no_regions() -> None:
    assert hello(PREFILL, SETTINGS, ScriptedFabric()).regions == ()


def test_hello_of_a_worker_with_a_drafter_says_the_layout_of_its_cache() -> None:
    with_drafter = dataclasses.replace(PREFILL, draft_layout=LAYOUT)
    assert hello(with_drafter, SETTINGS, ScriptedFabric()).draft_layout == LAYOUT
    refusal = mismatch(with_drafter, ScriptedFabric(), THEIRS)
    assert refusal is not None and refusal.field == "draft_layout"


def test_workers_of_different_numbers_of_ranks_do_not_refuse_each_other() -> None:
    assert mismatch(PREFILL, ScriptedFabric(), THEIRS) is None


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (replace(THEIRS, model_fingerprint="other"), ("model_fingerprint", "toy", "other")),
        (with_layout(page_slots=8), ("layout.page_slots", "4", "8")),
        (with_layout(dtype="bfloat16"), ("layout.dtype", "float32", "bfloat16")),
        (with_layout(num_layers=9), ("layout.num_layers", "2", "9")),
        (with_layout(head_dim=8), ("layout.head_dim", "2", "8")),
        (with_layout(num_planes=1), ("layout.num_planes", "2", "1")),
        (
            replace(THEIRS, sharding=replace(THEIRS.sharding, num_ranks=3)),
            (
                "tensor_parallel_size",
                "2",
                "tensor parallel size 3 neither divides 2 KV heads nor is a multiple of them",
            ),
        ),
        (replace(THEIRS, fabric_provider="shm"), ("fabric_provider", "scripted", "shm")),
        (replace(THEIRS, lease_s=math.nan), ("lease_s", "between 0.2 and 60", "nan")),
        (replace(THEIRS, lease_s=math.inf), ("lease_s", "between 0.2 and 60", "inf")),
        (replace(THEIRS, lease_s=-1.0), ("lease_s", "between 0.2 and 60", "-1")),
    ],
)
def test_refusal_names_what_differs_with_both_values(theirs: PeerHello, expected: tuple[str, str, str]) -> None:
    field, ours, their_value = expected
    refusal = PeerRefused(field=field, ours=ours, theirs=their_value)
    assert mismatch(PREFILL, ScriptedFabric(), theirs) == refusal

"""The regions that a decode worker offers: usable ones are attached by rank, and of unusable ones nothing stays."""

import pytest
from msgspec.structs import replace
from tests.pure.prefill_side import DECODE, LAYOUT, TAIL_BYTES, PrefillSide, hello_of, region
from tests.pure.scripted_fabric import REGION_BYTES, ScriptedFabric

from pdserve.errors import FabricError, RemoteProtocolError
from pdserve.fabric.port import RegionDescriptor
from pdserve.ids import Incarnation
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.transfer.target import attach_targets
from pdserve.wire.peer import PeerHello

OTHER = Incarnation(5)
TWO_RANKS = KvSharding(layout=LAYOUT, num_ranks=2)
HELLO = hello_of(OTHER, sharding=TWO_RANKS, num_dp_ranks=2)
MALFORMED = RegionDescriptor(num_bytes=2 * REGION_BYTES, nics=(0,), slices=region(1).slices)
"""Its slices end before it does."""


@pytest.fixture
def fabric() -> ScriptedFabric:
    return ScriptedFabric()


def with_kv(*kv: RegionDescriptor) -> PeerHello:
    """The second data parallel rank offers `kv`."""
    first, second = HELLO.regions
    return replace(HELLO, regions=(first, replace(second, kv=kv)))


def test_targets_are_attached_by_data_parallel_and_tensor_parallel_rank(fabric: ScriptedFabric) -> None:
    targets = attach_targets(fabric, HELLO, tail_slot_bytes=TAIL_BYTES)
    attached = [
        ([fabric.attached[region_id] for region_id in target.kv], fabric.attached[target.tail]) for target in targets
    ]
    assert attached == [(list(regions.kv), regions.tail) for regions in HELLO.regions]
    assert len({target.peer_id for target in targets}) == 1
    assert {target.num_tail_slots for target in targets} == {REGION_BYTES // TAIL_BYTES}
    assert {(target.sharding, target.num_pages) for target in targets} == {(TWO_RANKS, HELLO.num_pages)}


@pytest.mark.parametrize(
    ("hello", "problem"),
    [
        (replace(HELLO, regions=()), "must offer its KV and tail regions"),
        (with_kv(), "2 ranks offer 0 KV regions"),
        (with_kv(region(1)), "2 ranks offer 1 KV regions"),
        (with_kv(region(1), region(2), region(3)), "2 ranks offer 3 KV regions"),
        (with_kv(region(1), region(2, num_bytes=4095)), "32 pages do not fit the offered 4095 bytes"),
    ],
)
def test_hello_without_enough_regions_is_a_protocol_error(
    fabric: ScriptedFabric, hello: PeerHello, problem: str
) -> None:
    assert TWO_RANKS.rank_layout.region_bytes(HELLO.num_pages) == 4096
    with pytest.raises(RemoteProtocolError, match=problem):
        attach_targets(fabric, hello, tail_slot_bytes=TAIL_BYTES)
    assert not fabric.attached


def test_hello_with_a_region_that_just_holds_its_pages_is_accepted(fabric: ScriptedFabric) -> None:
    hello = with_kv(region(1), region(2, num_bytes=TWO_RANKS.rank_layout.region_bytes(HELLO.num_pages)))
    assert len(attach_targets(fabric, hello, tail_slot_bytes=TAIL_BYTES)) == 2


def test_drafters_region_is_attached_with_the_others(fabric: ScriptedFabric) -> None:
    hello = hello_of(OTHER, draft_layout=LAYOUT, num_dp_ranks=2)
    targets = attach_targets(fabric, hello, tail_slot_bytes=TAIL_BYTES)
    attached = [[fabric.attached[region_id] for region_id in target.regions] for target in targets]
    assert attached == [[*regions.kv, regions.draft_kv, regions.tail] for regions in hello.regions]


@pytest.mark.parametrize(
    ("layout", "offered", "problem"),
    [
        (LAYOUT, None, "a drafter's layout and its KV region are offered together"),
        (None, region(1), "a drafter's layout and its KV region are offered together"),
        (LAYOUT, region(1, num_bytes=8191), "32 pages do not fit the offered 8191 bytes"),
    ],
)
def test_hello_without_a_usable_region_for_the_drafter_is_a_protocol_error(
    fabric: ScriptedFabric, layout: KvLayout | None, offered: RegionDescriptor | None, problem: str
) -> None:
    assert LAYOUT.region_bytes(HELLO.num_pages) == 8192
    (regions,) = hello_of(OTHER).regions
    hello = replace(hello_of(OTHER), draft_layout=layout, regions=(replace(regions, draft_kv=offered),))
    with pytest.raises(RemoteProtocolError, match=problem):
        attach_targets(fabric, hello, tail_slot_bytes=TAIL_BYTES)
    assert not fabric.attached


@pytest.mark.parametrize("place", ["kv", "tail"])
def test_hello_with_a_malformed_region_leaves_no_peer_behind(fabric: ScriptedFabric, place: str) -> None:
    first, second = HELLO.regions
    broken = replace(second, kv=(region(1), MALFORMED)) if place == "kv" else replace(second, tail=MALFORMED)
    with pytest.raises(FabricError, match="slices cover"):
        attach_targets(fabric, replace(HELLO, regions=(first, broken)), tail_slot_bytes=TAIL_BYTES)
    assert len(fabric.disconnected) == 1


@pytest.mark.parametrize("hello", [replace(HELLO, regions=()), with_kv(region(1), MALFORMED)])
def test_sender_does_not_connect_a_peer_whose_regions_are_unusable(hello: PeerHello) -> None:
    side = PrefillSide()
    with pytest.raises((RemoteProtocolError, FabricError)):
        side.sender.peer_joined(hello)
    assert not side.sender.is_connected(OTHER)
    assert side.sender.is_connected(DECODE)
    side.sender.peer_joined(HELLO)
    assert side.sender.is_connected(OTHER)

"""The codec: what is encoded comes back equal, and no bytes whatever raise anything but the two wire errors."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config.role import Role
from pdserve.errors import LocalProtocolError, RemoteProtocolError
from pdserve.fabric.port import RegionDescriptor, RegionSlice
from pdserve.ids import HandoffId, Immediate, Incarnation, RequestId, TailSlot, WorkerId
from pdserve.kv.layout import KvLayout
from pdserve.kv.shard import KvSharding
from pdserve.sampling import SamplingParams, TokenLogprobs
from pdserve.wire import codec as codec_module
from pdserve.wire.cluster import (
    Abort,
    Delta,
    Failed,
    FailureKind,
    FinishReason,
    Generate,
    Generated,
    Join,
    Leave,
    Load,
    PrefillPlace,
    PrefillPool,
    PrefillTarget,
    TokenEntry,
    WorkerHeartbeat,
)
from pdserve.wire.codec import Codec, decode_side_codec, gateway_codec, prefill_side_codec, worker_codec
from pdserve.wire.peer import Cancel, Grant, GrantRefused, HandoffStopped, Message, PeerHello, RankRegions

counts = st.integers(0, 2**31)
incarnations = st.integers(0, 2**63 - 1).map(Incarnation)
request_ids = st.text(max_size=12).map(RequestId)
token_ids = st.lists(st.integers(0, 2**20), max_size=8).map(tuple)
finite = st.floats(allow_nan=False, allow_infinity=False)
targets = st.builds(PrefillTarget, worker_id=st.text().map(WorkerId), incarnation=incarnations, url=st.text())
entries = st.builds(
    TokenEntry,
    text_offset=counts,
    logprobs=st.builds(
        TokenLogprobs,
        token_id=counts,
        logprob=finite,
        top=st.lists(st.tuples(counts, finite), max_size=2).map(tuple),
    ),
)
deltas = st.builds(
    Delta,
    request_id=request_ids,
    token_ids=token_ids,
    text=st.text(max_size=12),
    entries=st.lists(entries, max_size=2).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    prefill=st.none() | st.sampled_from(PrefillPlace),
)
loads = st.lists(st.builds(Load, num_running=counts, num_free_pages=counts), max_size=3).map(tuple)
layouts = st.builds(
    KvLayout, num_layers=counts, num_kv_heads=counts, head_dim=counts, page_slots=counts, dtype=st.text(max_size=8)
)
slices = st.builds(RegionSlice, start=counts, num_bytes=counts, base=counts, keys=st.tuples(counts, counts))
descriptors = st.builds(
    RegionDescriptor, num_bytes=counts, nics=st.tuples(counts, counts), slices=st.lists(slices, max_size=2).map(tuple)
)
rank_regions = st.builds(RankRegions, kv=st.lists(descriptors, max_size=2).map(tuple), tail=descriptors)
hellos = st.builds(
    PeerHello,
    protocol_version=counts,
    worker_id=st.text(max_size=12).map(WorkerId),
    incarnation=incarnations,
    model_fingerprint=st.text(max_size=12),
    sharding=st.builds(KvSharding, layout=layouts, num_ranks=counts),
    num_pages=counts,
    tail_slot_bytes=counts,
    heartbeat_s=finite,
    lease_s=finite,
    fabric_provider=st.text(max_size=12),
    fabric_address=st.binary(max_size=12),
    regions=st.lists(rank_regions, max_size=2).map(tuple),
)
addressed = {"sender": incarnations, "receiver": incarnations, "handoff_id": counts.map(HandoffId)}

to_gateway = st.one_of(
    st.builds(
        Join,
        protocol_version=counts,
        worker_id=st.text(max_size=12).map(WorkerId),
        incarnation=incarnations,
        role=st.sampled_from(Role),
        url=st.text(max_size=12),
        model_name=st.text(max_size=12),
        model_fingerprint=st.text(max_size=12),
        max_model_len=counts,
        lease_s=finite,
        tensor_parallel_size=st.integers(1, 16),
        loads=loads,
    ),
    st.builds(WorkerHeartbeat, sender=incarnations, loads=loads, num_prefill_peers=counts),
    st.builds(Generated, sender=incarnations, deltas=st.lists(deltas, max_size=4).map(tuple)),
    st.builds(
        Failed,
        sender=incarnations,
        request_id=request_ids,
        kind=st.sampled_from(FailureKind),
        message=st.text(),
        retry_after_s=st.none() | finite,
    ),
    st.builds(Leave, sender=incarnations),
)
to_worker = st.one_of(
    st.builds(Abort, request_id=request_ids, receiver=incarnations),
    st.builds(PrefillPool, members=st.lists(targets, max_size=3).map(tuple)),
    st.builds(
        Generate,
        request_id=request_ids,
        receiver=incarnations,
        dp_rank=counts,
        prompt_token_ids=token_ids,
        sampling=st.builds(
            SamplingParams,
            max_tokens=counts,
            temperature=finite,
            stop=st.just(("a", "b")),
            logit_bias=st.lists(st.tuples(counts, finite), max_size=3).map(tuple),
        ),
        prefill=st.none() | targets,
        timeout_s=finite,
    ),
)
to_prefill = st.one_of(
    st.builds(Cancel, **addressed),
    st.builds(
        Grant,
        request_id=request_ids,
        dp_rank=counts,
        token_ids=token_ids,
        num_held_tokens=counts,
        page_indices=token_ids,
        immediate=counts.map(Immediate),
        tail_slot=counts.map(TailSlot),
        timeout_s=finite,
        **addressed,
    ),
)
to_decode = st.one_of(
    st.builds(GrantRefused, message=st.text(), retry_after_s=finite, **addressed),
    st.builds(HandoffStopped, message=st.text(), **addressed),
)
directions: list[tuple[Codec[Any], st.SearchStrategy[Message]]] = [
    (gateway_codec(), to_gateway),
    (worker_codec(), to_worker),
    (prefill_side_codec(), to_prefill),
    (decode_side_codec(), to_decode),
]
anything = st.sampled_from(directions).flatmap(lambda direction: st.tuples(st.just(direction[0]), direction[1]))


@given(anything)
def test_codec_message_comes_back_equal(sent: tuple[Codec[Any], Message]) -> None:
    codec, message = sent
    assert codec.decode(codec.encode(message), peer="p") == message


@given(hellos)
def test_codec_hello_comes_back_equal_on_either_side(hello: PeerHello) -> None:
    for codec in (decode_side_codec(), prefill_side_codec()):
        assert codec.decode(codec.encode(hello), peer="p") == hello


@given(anything, st.integers(0, 10**6), st.integers(1, 255), st.booleans())
def test_codec_damaged_message_is_a_message_or_the_peers_error(
    sent: tuple[Codec[Any], Message], position: int, flipped: int, cut: bool
) -> None:
    codec, message = sent
    damaged = bytearray(codec.encode(message))
    position %= len(damaged)
    damaged[position] ^= flipped
    try:
        codec.decode(bytes(damaged[:position] if cut else damaged), peer="p")
    except RemoteProtocolError as error:
        assert error.peer == "p"


@given(st.binary(max_size=64))
def test_codec_any_bytes_are_a_message_or_the_peers_error(received: bytes) -> None:
    for codec, _ in directions:
        try:
            codec.decode(received, peer="p")
        except RemoteProtocolError as error:
            assert error.peer == "p"


@pytest.mark.parametrize("received", [b"\x82\xa1a" + b"\x91" * 100_000 + b"\xc0\xa4type\xa5Leave", b"\x91" * 100_000])
def test_codec_deeply_nested_bytes_are_the_peers_error(received: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        gateway_codec().decode(received, peer="p")


@given(st.sampled_from(directions), st.sampled_from(directions), st.data())
def test_codec_message_of_another_direction_is_the_peers_error(
    ours: tuple[Codec[Any], object], theirs: tuple[object, st.SearchStrategy[Message]], data: st.DataObject
) -> None:
    message = data.draw(theirs[1])
    received = msgspec.msgpack.encode(message)
    if ours[1] is theirs[1]:
        assert ours[0].decode(received, peer="p") == message
    else:
        with pytest.raises(RemoteProtocolError):
            ours[0].decode(received, peer="p")


def test_codec_unknown_field_is_the_peers_error() -> None:
    received = msgspec.msgpack.encode({"type": "Leave", "sender": 1, "reason": "new"})
    with pytest.raises(RemoteProtocolError, match="reason"):
        gateway_codec().decode(received, peer="p")


def test_codec_message_over_the_bound_is_refused_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Leave(sender=Incarnation(1))
    num_bytes = len(gateway_codec().encode(message))
    monkeypatch.setattr(codec_module, "MAX_MESSAGE_BYTES", num_bytes)
    received = gateway_codec().encode(message)
    gateway_codec().decode(received, peer="p")
    monkeypatch.setattr(codec_module, "MAX_MESSAGE_BYTES", num_bytes - 1)
    with pytest.raises(LocalProtocolError):
        gateway_codec().encode(message)
    with pytest.raises(RemoteProtocolError):
        gateway_codec().decode(received, peer="p")

"""The geometry of the KV region against an enumeration of all its parts."""

from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import LayoutMismatch
from pdserve.kv.layout import KvLayout

SMOLLM2 = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, page_slots=16, dtype="float32")

LAYOUTS = st.builds(
    KvLayout,
    num_layers=st.integers(1, 4),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.integers(1, 8),
    page_slots=st.integers(1, 8),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    num_planes=st.integers(1, 2),
)


def test_kv_layout_of_the_default_model_has_the_known_sizes() -> None:
    assert SMOLLM2.token_bytes == 46_080
    assert SMOLLM2.page_bytes == 24_576
    assert SMOLLM2.region_bytes(10) == 46_080 * 16 * 10


def test_kv_layout_of_a_latent_cache_has_the_known_sizes() -> None:
    # DeepSeek-V3: 512 of the compressed latent and 64 of the rotated key, for all heads.
    latent = KvLayout(num_layers=61, num_kv_heads=1, head_dim=576, page_slots=16, dtype="bfloat16", num_planes=1)
    assert latent.token_bytes == 70_272
    assert latent.page_bytes == latent.head_bytes == 18_432


@given(layout=LAYOUTS)
def test_kv_layout_page_is_its_heads_planes_and_slots_side_by_side(layout: KvLayout) -> None:
    num_vectors = len(list(product(range(layout.num_kv_heads), range(layout.num_planes), range(layout.page_slots))))
    assert layout.page_bytes == num_vectors * layout.slot_bytes == layout.num_kv_heads * layout.head_bytes


@given(layout=LAYOUTS, num_pages=st.integers(1, 6))
def test_kv_layout_pages_tile_the_region_in_order(layout: KvLayout, num_pages: int) -> None:
    expected_offset = 0
    for layer_index, page_index in product(range(layout.num_layers), range(num_pages)):
        offset = layout.page_offset(layer_index=layer_index, page_index=page_index, num_pages=num_pages)
        assert offset == expected_offset
        expected_offset += layout.page_bytes
    assert layout.region_bytes(num_pages) == expected_offset
    assert layout.layer_bytes(num_pages) * layout.num_layers == expected_offset
    assert layout.token_bytes * layout.page_slots * num_pages == expected_offset


@given(layout=LAYOUTS, num_tokens=st.integers(0, 100))
def test_kv_layout_page_count_covers_the_tokens_and_no_more(layout: KvLayout, num_tokens: int) -> None:
    num_pages = layout.num_pages_for(num_tokens)
    assert (num_pages - 1) * layout.page_slots < num_tokens <= num_pages * layout.page_slots


def test_kv_layout_equal_to_the_peers_is_accepted() -> None:
    SMOLLM2.require_equal(msgspec.structs.replace(SMOLLM2), peer="p0")


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("num_layers", 31),
        ("num_kv_heads", 1),
        ("head_dim", 128),
        ("page_slots", 32),
        ("dtype", "bfloat16"),
        ("num_planes", 1),
    ],
)
def test_kv_layout_difference_names_the_field_and_both_values(field: str, theirs: object) -> None:
    other = msgspec.convert({**msgspec.to_builtins(SMOLLM2), field: theirs}, KvLayout)
    with pytest.raises(LayoutMismatch, match=f"differ in {field}") as caught:
        SMOLLM2.require_equal(other, peer="p0")
    assert (caught.value.field, caught.value.theirs, caught.value.peer) == (field, theirs, "p0")
    assert caught.value.ours == getattr(SMOLLM2, field)

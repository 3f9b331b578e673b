"""A model made of hashes: every byte of its KV cache is known in advance, and every wrong byte changes the answer.

A KV head's seed at a position is the hash of its seed at the position before and of the token; it is the vector in the
first layer and plane, and the vectors in the others are hashes of it. The next token is a hash of what all query heads
see, each in its KV head on its own rank: so the answer is the same for any number of ranks, and a wrong byte on a
replica changes it too.
"""

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pdserve.kv.layout import KvLayout

GQA = KvLayout(num_layers=2, num_kv_heads=2, head_dim=2, page_slots=4, dtype="float32")
MLA = KvLayout(num_layers=2, num_kv_heads=1, head_dim=2, page_slots=4, dtype="float32", num_planes=1)

NUM_QUERY_HEADS = 4
"""As many ranks at most, with one each."""

VECTOR_BYTES = GQA.slot_bytes
TAIL_BYTES = 64
VOCABULARY = 97
UNLIKELY = -10.0
"""The logprob of every token that the model would not sample."""


def digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=VECTOR_BYTES).digest()


def seed_after(before: bytes, token_id: int, *, head: int) -> bytes:
    """`before` is empty at the first position."""
    return digest(before, bytes([head]), token_id.to_bytes(4, "little"))


def vector_of(seed: bytes, *, layer_index: int, plane: int) -> bytes:
    return digest(seed, bytes([layer_index, plane])) if layer_index or plane else seed


def next_token(kv_of_query_heads: Iterable[bytes]) -> int:
    """From all KV that each query head sees: `[layer][plane][token][byte]`."""
    seen = [digest(kv) for kv in kv_of_query_heads]
    return int.from_bytes(digest(*seen), "little") % VOCABULARY


def tail_after(seeds_of_query_heads: Iterable[bytes]) -> bytes:
    """From the seed that each query head sees at the last computed position."""
    return digest(*seeds_of_query_heads) * (TAIL_BYTES // VECTOR_BYTES)


def kv_head_of(layout: KvLayout, query_head: int) -> int:
    return query_head * layout.num_kv_heads // NUM_QUERY_HEADS


# What it must come to, computed without pages and ranks


@lru_cache(maxsize=8192)
def reference_kv(layout: KvLayout, token_ids: tuple[int, ...]) -> NDArray[np.uint8]:
    """`[layer][head][plane][token][byte]`."""
    if not token_ids:
        shape = (layout.num_layers, layout.num_kv_heads, layout.num_planes, 0, VECTOR_BYTES)
        return np.zeros(shape, np.uint8)
    before = reference_kv(layout, token_ids[:-1])
    seeds = [
        seed_after(before[0, head, 0, -1:].tobytes(), token_ids[-1], head=head) for head in range(layout.num_kv_heads)
    ]
    vectors = b"".join(
        vector_of(seed, layer_index=layer_index, plane=plane)
        for layer_index in range(layout.num_layers)
        for seed in seeds
        for plane in range(layout.num_planes)
    )
    return np.concatenate([before, np.frombuffer(vectors, np.uint8).reshape(*before.shape[:3], 1, -1)], axis=3)


@lru_cache(maxsize=1024)
def reference_tokens(layout: KvLayout, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """What the model answers."""
    token_ids = prompt
    for _ in range(max_tokens):
        kv = reference_kv(layout, token_ids)
        token_ids += (next_token(kv[:, kv_head_of(layout, query)].tobytes() for query in range(NUM_QUERY_HEADS)),)
    return token_ids[len(prompt) :]


def reference_tail(layout: KvLayout, computed_token_ids: tuple[int, ...]) -> bytes:
    kv = reference_kv(layout, computed_token_ids)
    return tail_after(kv[0, kv_head_of(layout, query), 0, -1].tobytes() for query in range(NUM_QUERY_HEADS))

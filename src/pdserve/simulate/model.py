"""A model made of hashes: all of its KV is known in advance, and each wrong byte of it changes the answer.

A KV head's seed at a position is a hash of its seed at the position before and of the token, so it stands for the whole
prefix. It is the vector in the first layer and plane; the vectors in the others are hashes of it. The next token is a
hash of what all query heads see, each in its KV head on its own rank: so the answer is the same for any number of
ranks, and a wrong byte on a replica changes it too.

A drafter's seed is a hash of the model's hidden state at a token and of the token after it; it is kept at the position
of the first of the two.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from pdserve.kv.layout import KvLayout

GQA = KvLayout(num_layers=2, num_kv_heads=2, head_dim=2, page_slots=4, dtype="float32")
MLA = KvLayout(num_layers=2, num_kv_heads=1, head_dim=2, page_slots=4, dtype="float32", num_planes=1)
DRAFT = KvLayout(num_layers=3, num_kv_heads=1, head_dim=2, page_slots=4, dtype="float32")
PAGE_SLOTS = 4
"""Of each of them."""

NUM_QUERY_HEADS = 4
"""As many ranks at most, with one each."""

VECTOR_BYTES = GQA.slot_bytes
TAIL_BYTES = 64
VOCABULARY = 97
MAX_MODEL_LEN = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class HashModel:
    layout: KvLayout
    draft_layout: KvLayout | None = None
    """Of the cache of the drafter that each worker has beside it; None: there is none."""


HeadKv = tuple[tuple[bytes, ...], ...]
"""Vectors of one head, token after token: by layer and plane."""


def digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=VECTOR_BYTES).digest()


@lru_cache(maxsize=2**15)
def seed_after(before: bytes, token_id: int, *, head: int) -> bytes:
    """`before` is empty at the first position."""
    return digest(before, bytes([head]), token_id.to_bytes(4, "little"))


@lru_cache(maxsize=2**16)
def vector_of(seed: bytes, *, layer_index: int, plane: int) -> bytes:
    return digest(seed, bytes([layer_index, plane])) if layer_index or plane else seed


def next_token(kv_of_query_heads: Iterable[HeadKv]) -> int:
    """From all KV that each query head sees."""
    seen = [digest(*(vectors for layer in kv for vectors in layer)) for kv in kv_of_query_heads]
    return int.from_bytes(digest(*seen), "little") % VOCABULARY


def hidden_of(seeds_of_query_heads: Iterable[bytes]) -> bytes:
    """From the seed that each query head sees at a position: what a tail holds of the last one."""
    return digest(*seeds_of_query_heads) * (TAIL_BYTES // VECTOR_BYTES)


def draft_seed(hidden: bytes, next_token_id: int) -> bytes:
    return digest(hidden, next_token_id.to_bytes(4, "little"))


def kv_head_of(layout: KvLayout, query_head: int) -> int:
    return query_head * layout.num_kv_heads // NUM_QUERY_HEADS


# What it must come to, computed without pages and ranks


@lru_cache(maxsize=4096)
def reference_kv(layout: KvLayout, head: int, token_ids: tuple[int, ...]) -> HeadKv:
    return _kv_from(layout, _seeds(head, token_ids))


@lru_cache(maxsize=4096)
def reference_draft_kv(model: HashModel, token_ids: tuple[int, ...]) -> HeadKv:
    """Of the one head of the drafter, which has a vector less than there are tokens."""
    assert model.draft_layout is not None
    hidden = _hidden(model.layout, token_ids)
    return _kv_from(model.draft_layout, tuple(map(draft_seed, hidden, token_ids[1:])))


@lru_cache(maxsize=4096)
def reference_answer(layout: KvLayout, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    token_ids = prompt
    for _ in range(max_tokens):
        token_ids += (_reference_next(layout, token_ids),)
    return token_ids[len(prompt) :]


def reference_tail(layout: KvLayout, computed_token_ids: tuple[int, ...]) -> bytes:
    return _hidden(layout, computed_token_ids)[-1]


@lru_cache(maxsize=4096)
def _reference_next(layout: KvLayout, token_ids: tuple[int, ...]) -> int:
    return next_token(reference_kv(layout, kv_head_of(layout, query), token_ids) for query in range(NUM_QUERY_HEADS))


@lru_cache(maxsize=4096)
def _hidden(layout: KvLayout, token_ids: tuple[int, ...]) -> tuple[bytes, ...]:
    """By position."""
    seeds = [_seeds(kv_head_of(layout, query), token_ids) for query in range(NUM_QUERY_HEADS)]
    return tuple(hidden_of(at_position) for at_position in zip(*seeds, strict=True))


@lru_cache(maxsize=4096)
def _seeds(head: int, token_ids: tuple[int, ...]) -> tuple[bytes, ...]:
    seeds = [b""]
    for token_id in token_ids:
        seeds.append(seed_after(seeds[-1], token_id, head=head))
    return tuple(seeds[1:])


def _kv_from(layout: KvLayout, seeds: tuple[bytes, ...]) -> HeadKv:
    return tuple(
        tuple(
            b"".join(vector_of(seed, layer_index=layer_index, plane=plane) for seed in seeds)
            for plane in range(layout.num_planes)
        )
        for layer_index in range(layout.num_layers)
    )

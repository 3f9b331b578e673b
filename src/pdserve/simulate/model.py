"""A model made of hashes: all of its KV is known in advance, and each wrong slot of a page changes the answer.

The slot of a token in the first layer is a hash of the slot before it and of the token, so it stands for the whole
prefix; in the second layer it is a hash of the slot below. The next token is a hash of every slot that attention reads.
"""

import hashlib
from functools import lru_cache

from pdserve.kv.layout import KvLayout

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=2, page_slots=4, dtype="float32", num_planes=1)
SLOT_BYTES = LAYOUT.slot_bytes
TAIL_BYTES = 64
VOCABULARY = 97
MAX_MODEL_LEN = 48


def digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=SLOT_BYTES).digest()


def first_slot(before: bytes, token_id: int) -> bytes:
    """`before` is empty at the first position."""
    return digest(before, token_id.to_bytes(4, "little"))


def upper_slot(below: bytes) -> bytes:
    return digest(b"above", below)


def next_token(kv: tuple[bytes, ...]) -> int:
    """From the KV of all tokens so far, by layer."""
    return int.from_bytes(digest(*kv), "little") % VOCABULARY


def tail_of(last_slot: bytes) -> bytes:
    """From the slot of the last computed position in the last layer."""
    return last_slot * (TAIL_BYTES // SLOT_BYTES)


@lru_cache(maxsize=4096)
def reference_kv(token_ids: tuple[int, ...]) -> tuple[bytes, ...]:
    """By layer, without pages."""
    first: list[bytes] = []
    for token_id in token_ids:
        first.append(first_slot(first[-1] if first else b"", token_id))
    return b"".join(first), b"".join(map(upper_slot, first))


@lru_cache(maxsize=4096)
def reference_answer(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    token_ids = prompt
    for _ in range(max_tokens):
        token_ids += (next_token(reference_kv(token_ids)),)
    return token_ids[len(prompt) :]

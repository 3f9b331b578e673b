"""The layer counter: how a rank says "layer L of this pass is in the KV region", without Python on either side.

Layout of the shared region, native byte order (`native/layer_counter/layer_counter.h` is the same in C++):

    offset 0     u64  ticks       total since start; one after each layer's attention, one at the end of each pass
    offset 8     u32  futex       low half of ticks, the word a waiter sleeps on
    offset 64    u64  tick_ns[RING_TICKS]   CLOCK_MONOTONIC of tick t (counting from 1) at index t % RING_TICKS

`num_layers` counts all layers with a cache: the model's, then those of the drafter where there is one. A pass makes
`num_layers + 1` ticks. So pass p (from 0) has put layer L in the KV region once ticks >= p * (num_layers + 1) + L + 1,
and its tail in the tail region once ticks >= (p + 1) * (num_layers + 1).
"""

RING_TICKS = 4096
RING_OFFSET = 64
REGION_BYTES = RING_OFFSET + RING_TICKS * 8


def ticks_per_pass(num_layers: int) -> int:
    return num_layers + 1


def first_tick(*, pass_index: int, num_layers: int) -> int:
    """Ticks made before pass `pass_index` starts."""
    return pass_index * ticks_per_pass(num_layers)

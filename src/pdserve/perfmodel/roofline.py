"""An estimate from published figures alone, for hardware and models that no table covers.

A pass takes as long as its products or the memory they read, whichever is longer, and then its exchange between
accelerators and a fixed cost a layer. Nothing of it is measured; the shares of the published peaks that it takes for
granted are below.
"""

from pdserve.perfmodel.curve import Curve
from pdserve.perfmodel.fitted import FittedModel
from pdserve.perfmodel.placement import Placement

FLOPS_SHARE = 0.5
"""Of the published peak, that large products reach in serving engines."""
BANDWIDTH_SHARE = 0.7
LINK_SHARE = 0.7
EXCHANGE_S = 10e-6
"""Of one all-reduce or all-to-all, however few bytes."""
LAYER_S = 30e-6
"""Kernels started and norms, rotations and sampling of a layer, however few tokens."""
EXCHANGES_PER_LAYER = 2
ACTIVATION_BYTES = 2
PUSH_S = 50e-6
"""From the last layer's tick to the landing of a push of no bytes."""
COUNTS = tuple(2**power for power in range(16))


def roofline_model(placement: Placement) -> FittedModel:
    """An estimate. Requires: the weights fit."""
    hardware, shape, tp = placement.hardware, placement.shape, placement.tensor_parallel_size
    flops_per_s = FLOPS_SHARE * (hardware.fp8_flops if shape.param_bytes == 1 else hardware.bfloat16_flops)
    attention_flops_per_s = FLOPS_SHARE * hardware.bfloat16_flops
    memory_bytes_per_s = BANDWIDTH_SHARE * hardware.memory_bytes_per_s
    return FittedModel(
        provenance=(
            f"roofline estimate, nothing measured: {hardware.source}, at {FLOPS_SHARE:.0%} of its operations and "
            f"{BANDWIDTH_SHARE:.0%} of its bandwidth; {shape.source}"
        ),
        tokens_s=Curve(
            counts=COUNTS,
            seconds=tuple(
                max(
                    2 * shape.active_params * count / tp / flops_per_s,
                    _read_bytes(placement, count) / memory_bytes_per_s,
                )
                + _exchange_s(placement, count)
                + LAYER_S * shape.num_layers
                for count in COUNTS
            ),
        ),
        decode_tokens_s=Curve(counts=(0,), seconds=(0.0,)),
        prefill_key_s=shape.key_flops / tp / attention_flops_per_s,
        decode_key_s=shape.kv_rank_token_bytes(tp) / memory_bytes_per_s,
        push_bytes_s=push_curve(placement),
    )


def push_curve(placement: Placement) -> Curve:
    """Of one rank's KV over the network, through the adapter that each accelerator has for itself."""
    bytes_per_s = LINK_SHARE * placement.hardware.network_bytes_per_s
    return Curve(counts=(0, 10**9), seconds=(PUSH_S, PUSH_S + 10**9 / bytes_per_s))


def _read_bytes(placement: Placement, num_tokens: int) -> float:
    """Of weights, by each accelerator, in a pass of so many tokens on each data-parallel rank."""
    shape = placement.shape
    experts = shape.touched_expert_params(num_tokens * placement.data_parallel_size) / placement.num_accelerators
    return (shape.dense_params / placement.tensor_parallel_size + experts) * shape.param_bytes


def _exchange_s(placement: Placement, num_tokens: int) -> float:
    """Between the accelerators of a worker: a ring's all-reduce of the hidden states, or an all-to-all as long."""
    if placement.num_accelerators == 1:
        return 0.0
    hidden_bytes = num_tokens * placement.shape.hidden * ACTIVATION_BYTES
    once_s = EXCHANGE_S + 2 * hidden_bytes / (LINK_SHARE * placement.hardware.peer_bytes_per_s)
    return EXCHANGES_PER_LAYER * placement.shape.num_layers * once_s

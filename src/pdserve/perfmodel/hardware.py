"""Accelerators that plans are made for: what their makers publish of them."""

from dataclasses import dataclass

from pdserve.errors import ConfigError

GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator of a node."""

    name: str
    table_system: str
    """What the `aiconfigurator-core` package calls it."""
    memory_bytes: float
    memory_bytes_per_s: float
    fp8_flops: float
    """A second, dense, of tensor cores; those of bfloat16 where there are none for FP8."""
    bfloat16_flops: float
    peer_bytes_per_s: float
    """To the other accelerators of its node, one way."""
    network_bytes_per_s: float
    """To other nodes, one way: one adapter of 400 Gb/s for each accelerator, or 200 Gb/s where these were usual."""
    num_in_node: int
    source: str


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            name="h200",
            table_system="h200_sxm",
            memory_bytes=141 * GB,
            memory_bytes_per_s=4800 * GB,
            fp8_flops=1979e12,
            bfloat16_flops=989e12,
            peer_bytes_per_s=450 * GB,
            network_bytes_per_s=50 * GB,
            num_in_node=8,
            source="NVIDIA H200 SXM data sheet",
        ),
        Hardware(
            name="h100",
            table_system="h100_sxm",
            memory_bytes=80 * GB,
            memory_bytes_per_s=3350 * GB,
            fp8_flops=1979e12,
            bfloat16_flops=989e12,
            peer_bytes_per_s=450 * GB,
            network_bytes_per_s=50 * GB,
            num_in_node=8,
            source="NVIDIA H100 SXM data sheet",
        ),
        Hardware(
            name="a100",
            table_system="a100_sxm",
            memory_bytes=80 * GB,
            memory_bytes_per_s=2039 * GB,
            fp8_flops=312e12,
            bfloat16_flops=312e12,
            peer_bytes_per_s=300 * GB,
            network_bytes_per_s=25 * GB,
            num_in_node=8,
            source="NVIDIA A100 80GB SXM data sheet",
        ),
    )
}


def hardware(name: str) -> Hardware:
    """Raises: `ConfigError` that names the known ones."""
    if name not in HARDWARE:
        raise ConfigError(f"the hardware '{name}' is not known; known are {', '.join(sorted(HARDWARE))}")
    return HARDWARE[name]

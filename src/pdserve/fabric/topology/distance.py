"""How far apart two PCI devices are, in the words of `nvidia-smi topo -m`."""

from enum import IntEnum

from pdserve.fabric.topology.machine import Machine, PciFunction

HOPS_BELOW_A_SWITCH = 2
"""From a switch to a device behind it: a downstream port, the device."""


class Distance(IntEnum):
    """Smaller is nearer."""

    PIX = 1
    """At most one PCIe switch between them."""
    PXB = 2
    """Several switches, but one root port: traffic stays below the CPU."""
    PHB = 3
    """Different root ports of one host bridge: through the CPU's PCIe."""
    NODE = 4
    """Different host bridges of one NUMA node."""
    SYS = 5
    """Different NUMA nodes, or unknown ones."""


def distance(machine: Machine, first: PciFunction | None, second: PciFunction | None) -> Distance:
    """The distance of two devices; None is one that has no place on PCI, such as a virtual interface."""
    if first is not None and second is not None:
        num_shared = _common_prefix(first.path, second.path)
        if num_shared == 1:
            return Distance.PHB
        if num_shared > 1:
            hops = max(len(first.path), len(second.path)) - num_shared
            return Distance.PIX if hops <= HOPS_BELOW_A_SWITCH else Distance.PXB
    return node_distance(machine.node_of(first), machine.node_of(second))


def node_distance(first: int | None, second: int | None) -> Distance:
    """The distance of two things of which no more than the NUMA nodes is known."""
    return Distance.NODE if first is not None and first == second else Distance.SYS


def _common_prefix(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    """How many elements both start with."""
    length = 0
    for ours, theirs in zip(first, second, strict=False):
        if ours != theirs:
            break
        length += 1
    return length

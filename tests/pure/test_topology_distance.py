"""Distances from PCI paths, as `nvidia-smi topo -m` names them."""

import pytest
from tests.pure.topology_machines import machine, pci

from pdserve.fabric.topology.distance import Distance, distance
from pdserve.fabric.topology.machine import PciFunction

TWO_NODES = machine(node_cores=[2, 2], gpu_nodes=[], nic_nodes=[])
SWITCH = ("pci0000:15", "0000:15:01.0", "0000:16:00.0")
BEHIND_SWITCH = pci(*SWITCH, "0000:17:00.0", "0000:18:00.0")


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (pci(*SWITCH, "0000:17:00.0", "0000:18:00.1"), Distance.PIX),
        (pci(*SWITCH, "0000:17:01.0", "0000:19:00.0"), Distance.PIX),
        (pci(*SWITCH, "0000:17:01.0", "0000:19:00.0", "0000:1a:00.0", "0000:1b:00.0"), Distance.PXB),
        (pci("pci0000:15", "0000:15:02.0", "0000:20:00.0"), Distance.PHB),
        (pci("pci0000:27", "0000:27:01.0", "0000:29:00.0"), Distance.NODE),
        (pci("pci0000:97", "0000:97:01.0", "0000:98:00.0", node=1), Distance.SYS),
        (pci("pci0000:97", "0000:97:01.0", "0000:98:00.0", node=None), Distance.SYS),
        (None, Distance.SYS),
    ],
)
def test_distance_over_each_kind_of_path_is_the_same_both_ways(other: PciFunction | None, expected: Distance) -> None:
    assert distance(TWO_NODES, BEHIND_SWITCH, other) is expected
    assert distance(TWO_NODES, other, BEHIND_SWITCH) is expected


def test_distance_on_a_machine_of_one_node_is_never_sys() -> None:
    one_node = machine(node_cores=[2], gpu_nodes=[], nic_nodes=[])
    far = pci("pci0000:97", "0000:98:00.0", node=None)
    assert distance(one_node, BEHIND_SWITCH, far) is Distance.NODE
    assert distance(one_node, BEHIND_SWITCH, None) is Distance.NODE

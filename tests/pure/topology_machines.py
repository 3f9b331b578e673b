"""Machines for topology tests: the recorded trees, and small ones made by hand."""

import shutil
from pathlib import Path

from pdserve.fabric.topology.machine import (
    MELLANOX,
    NVIDIA,
    Gpu,
    LinkLayer,
    Machine,
    NumaNode,
    PciFunction,
    PciLink,
    RdmaDevice,
    RdmaPort,
)

TREES = Path(__file__).parents[1] / "recorded_sysfs"
TREE_NAMES = ("hgx_h100", "p5_efa", "laptop")


def copy_of(name: str, parent: Path) -> Path:
    """A copy of a recorded tree that a test may spoil."""
    return shutil.copytree(TREES / name, parent / name, symlinks=True)


def pci(*path: str, node: int | None = 0, vendor_id: int = MELLANOX) -> PciFunction:
    return PciFunction(
        address=path[-1],
        path=path,
        vendor_id=vendor_id,
        device_id=0x1021,
        driver=None,
        numa_node=node,
        physical_address=None,
        link=PciLink(width=None, max_width=None, speed_gts=None, max_speed_gts=None),
    )


def machine(
    *,
    node_cores: list[int],
    gpu_nodes: list[int | None],
    nic_nodes: list[int | None],
    threads_per_core: int = 2,
) -> Machine:
    """Nodes of so many cores; GPUs and NICs each below a host bridge of its own."""
    num_cores = sum(node_cores)
    cores = tuple(tuple(core + thread * num_cores for thread in range(threads_per_core)) for core in range(num_cores))
    starts = [sum(node_cores[:index]) for index in range(len(node_cores))]
    return Machine(
        nodes=tuple(
            NumaNode(index=index, cpus=tuple(sorted(cpu for core in cores[start : start + count] for cpu in core)))
            for index, (start, count) in enumerate(zip(starts, node_cores, strict=True))
        ),
        cores=cores,
        gpus=tuple(
            Gpu(
                index=index,
                name="GPU",
                pci=pci(f"pci0000:{index:02x}", f"0000:{index:02x}:00.0", node=node, vendor_id=NVIDIA),
            )
            for index, node in enumerate(gpu_nodes)
        ),
        rdma_devices=tuple(
            RdmaDevice(
                name=f"mlx5_{index}",
                pci=pci(f"pci0000:{0x80 + index:02x}", f"0000:{0x80 + index:02x}:00.0", node=node),
                ports=(active_port(),),
            )
            for index, node in enumerate(nic_nodes)
        ),
        interfaces=(),
    )


def active_port() -> RdmaPort:
    return RdmaPort(
        number=1,
        state="ACTIVE",
        link_layer=LinkLayer.INFINIBAND,
        rate_gbps=400.0,
        rate_text="400 Gb/sec (4X NDR)",
    )

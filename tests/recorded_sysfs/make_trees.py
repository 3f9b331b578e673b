"""Writes the sysfs trees beside it anew: `python tests/recorded_sysfs/make_trees.py`. See README.md for what is real.

A tree has only the files that `pdserve.fabric.topology` reads, and each of those that a kernel would have.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent

CLASS_3D = 0x030200
CLASS_VGA = 0x030000
CLASS_ETHERNET = 0x020000
CLASS_INFINIBAND = 0x020700
CLASS_NETWORK_OTHER = 0x028000

ARP_ETHERNET, ARP_INFINIBAND, ARP_LOOPBACK = 1, 32, 772


@dataclass(frozen=True, kw_only=True)
class Link:
    speed: str
    width: int


GEN4_X8 = Link(speed="16.0 GT/s PCIe", width=8)
GEN5_X16 = Link(speed="32.0 GT/s PCIe", width=16)


@dataclass(frozen=True, kw_only=True)
class Pci:
    """A PCI function. `path` goes from the host bridge down to its address."""

    path: tuple[str, ...]
    pci_class: int
    pci_id: str
    driver: str
    node: int
    link: Link | None = None

    @property
    def folder(self) -> str:
        return "/".join(("devices", *self.path))


class Tree:
    """One sysfs tree under construction."""

    def __init__(self, name: str) -> None:
        self.root = HERE / name
        shutil.rmtree(self.root, ignore_errors=True)

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def link(self, path: str, target: str) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(self.root / target, link.parent))

    def cpus(self, nodes: list[str], cores: list[str]) -> None:
        """`nodes` and `cores` are CPU lists: of each NUMA node, and of the siblings of each core."""
        num_cpus = sum(len(core.split(",")) for core in cores)
        self.write("devices/system/cpu/online", f"0-{num_cpus - 1}")
        for index, cpus in enumerate(nodes):
            self.write(f"devices/system/node/node{index}/cpulist", cpus)
        for core in cores:
            self.write(f"devices/system/cpu/cpu{core.split(',')[0]}/topology/thread_siblings_list", core)

    def pci(self, pci: Pci) -> None:
        lines = {
            "DRIVER": pci.driver,
            "PCI_CLASS": f"{pci.pci_class:X}",
            "PCI_ID": pci.pci_id.upper(),
            "PCI_SLOT_NAME": pci.path[-1],
        }
        self.write(f"{pci.folder}/uevent", "\n".join(f"{key}={value}" for key, value in lines.items()))
        self.write(f"{pci.folder}/numa_node", pci.node)
        if pci.link is not None:
            for kind in ("current", "max"):
                self.write(f"{pci.folder}/{kind}_link_speed", pci.link.speed)
                self.write(f"{pci.folder}/{kind}_link_width", pci.link.width)
        self.link(f"bus/pci/devices/{pci.path[-1]}", pci.folder)

    def rdma(self, name: str, pci: Pci, *, rate: str, link_layer: str) -> None:
        port = f"{pci.folder}/infiniband/{name}/ports/1"
        self.write(f"{port}/state", "4: ACTIVE")
        self.write(f"{port}/rate", rate)
        self.write(f"{port}/link_layer", link_layer)
        self.link(f"class/infiniband/{name}", f"{pci.folder}/infiniband/{name}")

    def interface(self, name: str, pci: Pci | None, *, state: str, arp_type: int, speed_mbps: int | None) -> None:
        folder = f"{'devices/virtual' if pci is None else pci.folder}/net/{name}"
        self.write(f"{folder}/operstate", state)
        self.write(f"{folder}/type", arp_type)
        self.write(f"{folder}/flags", "0x9" if arp_type == ARP_LOOPBACK else "0x1003")
        if speed_mbps is not None:
            self.write(f"{folder}/speed", speed_mbps)
        self.link(f"class/net/{name}", folder)

    def loopback(self) -> None:
        self.interface("lo", None, state="unknown", arp_type=ARP_LOOPBACK, speed_mbps=None)


def address(bus: int, device: int = 0) -> str:
    return f"0000:{bus:02x}:{device:02x}.0"


def hgx_h100() -> None:
    """Two sockets of 56 cores; a 400G ConnectX-7 beside each GPU; a 200G Ethernet one a socket for storage."""
    tree = Tree("hgx_h100")
    tree.cpus(["0-55,112-167", "56-111,168-223"], [f"{core},{core + 112}" for core in range(112)])
    gpu_buses = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)
    compute_buses = (0x18, 0x40, 0x4F, 0x5E, 0x9A, 0xC0, 0xCE, 0xDC)
    storage_buses = (0x29, 0xAA)
    for gpu_bus, nic_bus in zip(gpu_buses, compute_buses, strict=True):
        root_bus, node = nic_bus - 3, 0 if nic_bus < 0x80 else 1
        switch = (f"pci0000:{root_bus:02x}", address(root_bus, 1), address(root_bus + 1))
        nic_path = (*switch, address(root_bus + 2, 0), address(nic_bus))
        gpu_path = (*switch, address(root_bus + 2, 1), address(gpu_bus - 2), address(gpu_bus - 1), address(gpu_bus))
        tree.pci(Pci(path=gpu_path, pci_class=CLASS_3D, pci_id="10de:2330", driver="nvidia", node=node, link=GEN5_X16))
        connectx(tree, nic_path, node, rdma_index=sorted((*compute_buses, *storage_buses)).index(nic_bus))
    for nic_bus, node in zip(storage_buses, (0, 1), strict=True):
        nic_path = (f"pci0000:{nic_bus - 1:02x}", address(nic_bus - 1, 1), address(nic_bus))
        index = sorted((*compute_buses, *storage_buses)).index(nic_bus)
        connectx(tree, nic_path, node, rdma_index=index, is_storage=True)
    management = Pci(
        path=("pci0000:00", address(0, 0x1C), address(0x0B)),
        pci_class=CLASS_ETHERNET,
        pci_id="8086:1563",
        driver="ixgbe",
        node=0,
        link=Link(speed="8.0 GT/s PCIe", width=4),
    )
    tree.pci(management)
    tree.interface("eno3", management, state="up", arp_type=ARP_ETHERNET, speed_mbps=10_000)
    tree.loopback()


def connectx(tree: Tree, path: tuple[str, ...], node: int, *, rdma_index: int, is_storage: bool = False) -> None:
    nic = Pci(
        path=path,
        pci_class=CLASS_ETHERNET if is_storage else CLASS_INFINIBAND,
        pci_id="15b3:1021",
        driver="mlx5_core",
        node=node,
        link=GEN5_X16,
    )
    tree.pci(nic)
    bus = int(path[-1].split(":")[1], 16)
    if is_storage:
        tree.rdma(f"mlx5_{rdma_index}", nic, rate="200 Gb/sec (4X HDR)", link_layer="Ethernet")
        tree.interface(f"enp{bus}s0np0", nic, state="up", arp_type=ARP_ETHERNET, speed_mbps=200_000)
    else:
        tree.rdma(f"mlx5_{rdma_index}", nic, rate="400 Gb/sec (4X NDR)", link_layer="InfiniBand")
        tree.interface(f"ibp{bus}s0", nic, state="up", arp_type=ARP_INFINIBAND, speed_mbps=400_000)


def p5_efa() -> None:
    """Two sockets of 48 cores; a switch for each GPU with four 100G EFA devices, which have no network interface."""
    tree = Tree("p5_efa")
    tree.cpus(["0-47,96-143", "48-95,144-191"], [f"{core},{core + 96}" for core in range(96)])
    for index in range(8):
        root_bus, node = 0x44 + 0x11 * index, index // 4
        switch = (f"pci0000:{root_bus:02x}", address(root_bus), address(root_bus + 1))
        gpu_path = (*switch, address(root_bus + 2, 0), address(root_bus + 0xF))
        tree.pci(Pci(path=gpu_path, pci_class=CLASS_3D, pci_id="10de:2330", driver="nvidia", node=node, link=GEN5_X16))
        for lane in range(4):
            bus = root_bus + 0xB + lane
            efa = Pci(
                path=(*switch, address(root_bus + 2, 1 + lane), address(bus)),
                pci_class=CLASS_ETHERNET,
                pci_id="1d0f:efa1",
                driver="efa",
                node=node,
                link=GEN4_X8,
            )
            tree.pci(efa)
            tree.rdma(f"rdmap{bus}s0", efa, rate="100 Gb/sec (4X EDR)", link_layer="Unknown")
    ena = Pci(path=("pci0000:00", address(0, 5)), pci_class=CLASS_ETHERNET, pci_id="1d0f:ec20", driver="ena", node=-1)
    tree.pci(ena)
    tree.interface("ens5", ena, state="up", arp_type=ARP_ETHERNET, speed_mbps=None)
    tree.loopback()


def laptop() -> None:
    """One NUMA node of four cores, integrated graphics, wifi up, no cable in the Ethernet port."""
    tree = Tree("laptop")
    tree.cpus(["0-7"], [f"{cpu},{cpu + 1}" for cpu in range(0, 8, 2)])
    bus = ("pci0000:00",)
    graphics = Pci(path=(*bus, address(0, 2)), pci_class=CLASS_VGA, pci_id="8086:9a49", driver="i915", node=-1)
    wifi = Pci(
        path=(*bus, "0000:00:14.3"), pci_class=CLASS_NETWORK_OTHER, pci_id="8086:a0f0", driver="iwlwifi", node=-1
    )
    ethernet = Pci(path=(*bus, "0000:00:1f.6"), pci_class=CLASS_ETHERNET, pci_id="8086:15fc", driver="e1000e", node=-1)
    for pci in (graphics, wifi, ethernet):
        tree.pci(pci)
    tree.interface("wlp0s20f3", wifi, state="up", arp_type=ARP_ETHERNET, speed_mbps=None)
    tree.interface("enp0s31f6", ethernet, state="down", arp_type=ARP_ETHERNET, speed_mbps=-1)
    tree.interface("docker0", None, state="down", arp_type=ARP_ETHERNET, speed_mbps=-1)
    tree.loopback()


if __name__ == "__main__":
    hgx_h100()
    p5_efa()
    laptop()

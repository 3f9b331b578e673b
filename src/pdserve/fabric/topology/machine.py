"""A machine as sysfs describes it: NUMA nodes and their cores, GPUs, RDMA devices, network interfaces."""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    index: int
    cpus: tuple[int, ...]
    """Those that are online."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PciLink:
    """What a link was trained to, and what the device could do. Units: lanes; GT/s. None: the device does not say."""

    width: int | None
    max_width: int | None
    speed_gts: float | None
    max_speed_gts: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PciFunction:
    address: str
    """Such as `0000:18:00.0`."""
    path: tuple[str, ...]
    """From the host bridge (`pci0000:15`) over root port and switches down to `address`."""
    vendor_id: int
    device_id: int
    driver: str | None
    numa_node: int | None
    """None: the firmware does not say (-1 in sysfs)."""
    physical_address: str | None
    """Of the function that this virtual one (SR-IOV) belongs to."""
    link: PciLink


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    index: int
    """In NVML's order where NVML was asked, else by PCI address."""
    name: str
    pci: PciFunction

    @property
    def label(self) -> str:
        return f"GPU{self.index}"


class LinkLayer(Enum):
    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"
    UNSPECIFIED = "unspecified"
    """What EFA says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    number: int
    state: str
    """The kernel's word, such as `ACTIVE` or `DOWN`."""
    link_layer: LinkLayer
    rate_gbps: float | None
    rate_text: str
    """The kernel's words, such as `400 Gb/sec (4X NDR)`."""

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """One entry of `/sys/class/infiniband`. `pci` is None for one made of software (rxe, siw)."""

    name: str
    pci: PciFunction | None
    ports: tuple[RdmaPort, ...]

    @property
    def is_efa(self) -> bool:
        return self.pci is not None and (self.pci.driver == "efa" or self.pci.vendor_id == AMAZON)

    @property
    def best_port(self) -> RdmaPort | None:
        """The fastest active port."""
        active = [port for port in self.ports if port.is_active]
        return max(active, key=lambda port: port.rate_gbps or 0.0, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetInterface:
    """One entry of `/sys/class/net`. `pci` is None for a virtual one (lo, veth, bridges)."""

    name: str
    is_up: bool
    is_loopback: bool
    rate_gbps: float | None
    pci: PciFunction | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    nodes: tuple[NumaNode, ...]
    """At least one."""
    cores: tuple[tuple[int, ...], ...]
    """The online CPUs by physical core: hyperthread siblings together, in the order of their first CPU."""
    gpus: tuple[Gpu, ...]
    rdma_devices: tuple[RdmaDevice, ...]
    interfaces: tuple[NetInterface, ...]

    def node_of(self, pci: PciFunction | None) -> int | None:
        """The NUMA node of a device: as it says, or the only one there is."""
        if pci is not None and pci.numa_node is not None:
            return pci.numa_node
        return self.nodes[0].index if len(self.nodes) == 1 else None

    def interface_of(self, device: RdmaDevice) -> NetInterface | None:
        """The network interface on the same PCI function, one that is up before others."""
        same = [each for each in self.interfaces if each.pci is not None and each.pci == device.pci]
        return max(same, key=lambda interface: interface.is_up, default=None)


NVIDIA = 0x10DE
AMAZON = 0x1D0F
MELLANOX = 0x15B3

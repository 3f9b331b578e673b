"""From a sysfs tree to a `Machine`. What is missing or nonsense in the tree is missing in the machine."""

import re
from collections.abc import Iterable
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.fabric.topology.machine import (
    NVIDIA,
    Gpu,
    LinkLayer,
    Machine,
    NetInterface,
    NumaNode,
    PciFunction,
    PciLink,
    RdmaDevice,
    RdmaPort,
)
from pdserve.fabric.topology.nvml import ListedGpu
from pdserve.fabric.topology.pci_names import pci_name
from pdserve.fabric.topology.sysfs import Sysfs

LIVE_SYSFS = Path("/sys")

MAX_LINK_LANES = 32
"""PCIe knows up to 32 lanes; virtual functions report 0 or 255."""

PCI_CLASS_VGA = 0x0300
PCI_CLASS_3D = 0x0302

ARP_LOOPBACK = 772
FLAG_UP = 0x1


def read_machine(root: Path, *, listed_gpus: Iterable[ListedGpu] = ()) -> Machine:
    """The machine that the sysfs tree at `root` describes; `listed_gpus` (NVML) gives GPUs their order and names.

    Raises: `ConfigError` when `root` is no sysfs tree.
    """
    sysfs = Sysfs(root)
    online = sysfs.cpu_list("devices/system/cpu/online")
    if not online:
        raise ConfigError(
            f"{root} is no sysfs: it has no devices/system/cpu/online that lists CPUs; name a directory such as /sys"
        )
    return Machine(
        nodes=_nodes(sysfs, online),
        cores=_cores(sysfs, online),
        gpus=_gpus(sysfs, tuple(listed_gpus)),
        rdma_devices=tuple(_rdma_device(sysfs, name) for name in sysfs.names("class/infiniband")),
        interfaces=tuple(
            _interface(sysfs, name)
            for name in sysfs.names("class/net")
            if sysfs.text(f"class/net/{name}/operstate") is not None
        ),
    )


def _nodes(sysfs: Sysfs, online: tuple[int, ...]) -> tuple[NumaNode, ...]:
    """The NUMA nodes; one with all CPUs where the kernel knows none, or does not put each online CPU in one of them."""
    nodes: list[NumaNode] = []
    for name in sysfs.names("devices/system/node"):
        if found := re.fullmatch(r"node(\d{1,5})", name):
            cpus = sysfs.cpu_list(f"devices/system/node/{name}/cpulist") or ()
            nodes.append(NumaNode(index=int(found[1]), cpus=cpus))
    if sorted(cpu for node in nodes for cpu in node.cpus) != list(online):
        return (NumaNode(index=0, cpus=online),)
    return tuple(nodes)


def _cores(sysfs: Sysfs, online: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The CPUs by physical core. Siblings of a CPU that was read are not read again."""
    cores: list[tuple[int, ...]] = []
    remaining = set(online)
    for cpu in online:
        if cpu in remaining:
            siblings = sysfs.cpu_list(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or ()
            core = tuple(sorted(remaining & {cpu, *siblings}))
            cores.append(core)
            remaining.difference_update(core)
    return tuple(cores)


def _gpus(sysfs: Sysfs, listed: tuple[ListedGpu, ...]) -> tuple[Gpu, ...]:
    functions: list[PciFunction] = []
    for address in sysfs.names("bus/pci/devices"):
        function = _pci_function(sysfs, f"bus/pci/devices/{address}")
        if function is not None and function.vendor_id == NVIDIA:
            device_class = _hex(sysfs.properties(f"bus/pci/devices/{address}/uevent").get("PCI_CLASS")) or 0
            if device_class >> 8 in (PCI_CLASS_VGA, PCI_CLASS_3D):
                functions.append(function)
    functions.sort(key=lambda function: [int(part, 16) for part in re.split("[:.]", function.address)])
    order = {gpu.pci_address: position for position, gpu in enumerate(listed)}
    names = {gpu.pci_address: gpu.name for gpu in listed}
    functions.sort(key=lambda function: order.get(function.address, len(order)))
    return tuple(
        Gpu(index=index, name=names.get(function.address, pci_name(function)), pci=function)
        for index, function in enumerate(functions)
    )


def _pci_function(sysfs: Sysfs, entry: str) -> PciFunction | None:
    """The PCI function that a link in a class or bus leads to, or that its device sits on."""
    path = sysfs.pci_path(entry)
    if path is None:
        return None
    folder = f"bus/pci/devices/{path[-1]}"
    physical_path = sysfs.pci_path(f"{folder}/physfn") if sysfs.exists(f"{folder}/physfn") else None
    properties = sysfs.properties(f"{folder}/uevent")
    vendor, _, device = properties.get("PCI_ID", "").partition(":")
    vendor_id, device_id = _hex(vendor), _hex(device)
    if vendor_id is None or device_id is None:
        return None
    return PciFunction(
        address=path[-1],
        path=path,
        vendor_id=vendor_id,
        device_id=device_id,
        driver=properties.get("DRIVER"),
        numa_node=sysfs.integer(f"{folder}/numa_node"),
        physical_address=None if physical_path is None else physical_path[-1],
        link=PciLink(
            width=_lanes(sysfs, f"{folder}/current_link_width"),
            max_width=_lanes(sysfs, f"{folder}/max_link_width"),
            speed_gts=sysfs.leading_number(f"{folder}/current_link_speed"),
            max_speed_gts=sysfs.leading_number(f"{folder}/max_link_speed"),
        ),
    )


def _lanes(sysfs: Sysfs, path: str) -> int | None:
    lanes = sysfs.integer(path)
    return lanes if lanes is not None and 0 < lanes <= MAX_LINK_LANES else None


def _hex(text: str | None) -> int | None:
    return int(text, 16) if text is not None and re.fullmatch(r"[0-9A-Fa-f]{1,6}", text) else None


def _rdma_device(sysfs: Sysfs, name: str) -> RdmaDevice:
    folder = f"class/infiniband/{name}"
    numbers = [int(number) for number in sysfs.names(f"{folder}/ports") if re.fullmatch(r"[0-9]{1,3}", number)]
    return RdmaDevice(
        name=name,
        pci=_pci_function(sysfs, folder),
        ports=tuple(_rdma_port(sysfs, f"{folder}/ports/{number}", number) for number in numbers),
    )


def _rdma_port(sysfs: Sysfs, folder: str, number: int) -> RdmaPort:
    layers = {layer.value: layer for layer in LinkLayer}
    state = sysfs.text(f"{folder}/state") or "unknown"
    return RdmaPort(
        number=number,
        # `4: ACTIVE`
        state=state.rpartition(":")[2].strip(),
        link_layer=layers.get(sysfs.text(f"{folder}/link_layer") or "", LinkLayer.UNSPECIFIED),
        rate_gbps=sysfs.leading_number(f"{folder}/rate"),
        rate_text=sysfs.text(f"{folder}/rate") or "unknown rate",
    )


def _interface(sysfs: Sysfs, name: str) -> NetInterface:
    folder = f"class/net/{name}"
    state = sysfs.text(f"{folder}/operstate")
    flags = sysfs.text(f"{folder}/flags") or ""
    speed_mbps = sysfs.integer(f"{folder}/speed")
    is_flagged_up = bool((_hex(flags.removeprefix("0x")) or 0) & FLAG_UP)
    return NetInterface(
        name=name,
        # Drivers that do not track their link, lo among them, say `unknown` for ever.
        is_up=state == "up" or (state == "unknown" and is_flagged_up),
        is_loopback=sysfs.integer(f"{folder}/type") == ARP_LOOPBACK,
        rate_gbps=speed_mbps / 1000 if speed_mbps else None,
        pci=_pci_function(sysfs, folder),
    )

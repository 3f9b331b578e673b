"""Which NICs can carry KV pages, and the libfabric provider that drives them."""

from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from pdserve.fabric.topology.machine import LinkLayer, Machine, NetInterface, PciFunction, RdmaDevice


class Provider(Enum):
    """libfabric's name of what drives the NICs."""

    VERBS = "verbs"
    EFA = "efa"
    TCP = "tcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    name: str
    """Of the RDMA device; with tcp, of the network interface."""
    interface: str | None
    """The network interface that carries its IP address; EFA devices may have none."""
    pci: PciFunction | None
    rate_gbps: float | None


def recommended_provider(machine: Machine) -> Provider:
    """EFA or verbs where a NIC of that kind has an active port, else tcp."""
    usable = [device for device in machine.rdma_devices if device.pci is not None and device.best_port is not None]
    if any(device.is_efa for device in usable):
        return Provider.EFA
    return Provider.VERBS if usable else Provider.TCP


def usable_nics(machine: Machine, provider: Provider) -> tuple[Nic, ...]:
    """The NICs that the provider can drive now, all on one kind of network."""
    match provider:
        case Provider.EFA:
            return tuple(
                _rdma_nic(machine, device) for device in machine.rdma_devices if device.is_efa and _active(device)
            )
        case Provider.VERBS:
            return _verbs_nics(machine)
        case Provider.TCP:
            return tuple(
                Nic(name=each.name, interface=each.name, pci=each.pci, rate_gbps=each.rate_gbps)
                for each in _tcp_interfaces(machine)
            )
        case _:
            assert_never(provider)


def _active(device: RdmaDevice) -> bool:
    return device.best_port is not None


def _rdma_nic(machine: Machine, device: RdmaDevice) -> Nic:
    interface, port = machine.interface_of(device), device.best_port
    return Nic(
        name=device.name,
        interface=None if interface is None else interface.name,
        pci=device.pci,
        rate_gbps=None if port is None else port.rate_gbps,
    )


def _verbs_nics(machine: Machine) -> tuple[Nic, ...]:
    """The NICs of the link layer with the most bandwidth: InfiniBand and Ethernet ports can't reach each other."""
    by_layer: dict[LinkLayer, list[Nic]] = {}
    for device in machine.rdma_devices:
        port = device.best_port
        if port is not None and not device.is_efa and _has_own_port(device, machine.rdma_devices):
            by_layer.setdefault(port.link_layer, []).append(_rdma_nic(machine, device))
    bandwidths = {layer: sum(nic.rate_gbps or 0.0 for nic in nics) for layer, nics in by_layer.items()}
    return tuple(by_layer[max(bandwidths, key=lambda layer: bandwidths[layer])]) if by_layer else ()


def _has_own_port(device: RdmaDevice, others: tuple[RdmaDevice, ...]) -> bool:
    """False for software, and for a virtual function whose port a physical one here has already."""
    if device.pci is None:
        return False
    physical = device.pci.physical_address
    return physical is None or not any(other.pci is not None and other.pci.address == physical for other in others)


def _tcp_interfaces(machine: Machine) -> list[NetInterface]:
    """Physical interfaces that are up; where there are none, virtual ones; where there are none, loopback."""
    up = [interface for interface in machine.interfaces if interface.is_up]
    physical = [interface for interface in up if interface.pci is not None]
    return physical or [interface for interface in up if not interface.is_loopback] or up

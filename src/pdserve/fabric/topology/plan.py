"""Gives each device its nearest NICs, and cores beside it for its rank and its fabric thread."""

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.errors import ConfigError
from pdserve.fabric.port import DomainGroup
from pdserve.fabric.topology.addresses import AddressOf
from pdserve.fabric.topology.cores import share_cores
from pdserve.fabric.topology.distance import Distance, distance, node_distance
from pdserve.fabric.topology.machine import Gpu, Machine
from pdserve.fabric.topology.nics import Nic, Provider, recommended_provider, usable_nics

GROUP_SIZES = (4, 2, 1)
"""NICs that one domain group drives. Powers of two, so that NICs of two sides pair evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NicGroup:
    """NICs that one fabric thread drives, and the CPUs for that thread."""

    nics: tuple[Nic, ...]
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevice:
    """A GPU, or a CPU rank where there are no GPUs."""

    label: str
    gpu: Gpu | None
    node: int | None
    group_index: int
    distance: Distance
    """To the NICs of its group."""
    cpus: tuple[int, ...]
    """For its rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The only group has no NICs when the machine has no network interface that is up."""

    provider: Provider
    groups: tuple[NicGroup, ...]
    devices: tuple[PlannedDevice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seat:
    """A device before it is given anything."""

    label: str
    gpu: Gpu | None
    node: int | None


def choose(
    machine: Machine,
    *,
    num_devices: int | None = None,
    allowed_cpus: Iterable[int] | None = None,
    provider: Provider | None = None,
) -> Plan:
    """The plan for the first `num_devices` GPUs; without GPUs, for as many CPU ranks (default: one a NUMA node).

    `allowed_cpus` are those this process may run on; default: all that are online. `provider`: default the best one.
    Raises: `ConfigError` when there are fewer GPUs than devices asked for.
    """
    provider = provider or recommended_provider(machine)
    nics = usable_nics(machine, provider)
    seats = _seats(machine, num_devices)
    online = frozenset(cpu for core in machine.cores for cpu in core)
    allowed = online if allowed_cpus is None else (online & frozenset(allowed_cpus)) or online
    chosen = _share_nics(machine, seats, nics)
    group_nics = tuple(dict.fromkeys(chosen))
    device_groups = [group_nics.index(nics_of_device) for nics_of_device in chosen]
    group_nodes = [_group_node(machine, index, group_nics, seats, device_groups) for index in range(len(group_nics))]
    shares = share_cores(
        machine,
        provider=provider,
        group_nodes=group_nodes,
        device_nodes=[
            group_nodes[group] if seat.node is None else seat.node
            for seat, group in zip(seats, device_groups, strict=True)
        ],
        device_groups=device_groups,
        allowed_cpus=allowed,
    )
    return Plan(
        provider=provider,
        groups=tuple(NicGroup(nics=nics, cpus=cpus) for nics, cpus in zip(group_nics, shares.groups, strict=True)),
        devices=tuple(
            _planned(machine, seat, group_index, group_nics[group_index], cpus)
            for seat, group_index, cpus in zip(seats, device_groups, shares.devices, strict=True)
        ),
    )


def _planned(
    machine: Machine, seat: _Seat, group_index: int, nics: tuple[Nic, ...], cpus: tuple[int, ...]
) -> PlannedDevice:
    return PlannedDevice(
        label=seat.label,
        gpu=seat.gpu,
        node=seat.node,
        group_index=group_index,
        distance=_distance_to_all(machine, seat, nics),
        cpus=cpus,
    )


def domain_groups(plan: Plan, address_of: AddressOf) -> tuple[DomainGroup, ...]:
    """The plan as the fabric takes it. EFA devices, which need no IP address, are named by their RDMA device.

    Raises: `ConfigError` when a NIC has no IP address to bind to, or there is no NIC.
    """
    if not all(group.nics for group in plan.groups):
        raise ConfigError("no network interface is up; bring one up, or name an address to bind to")
    return tuple(
        DomainGroup(bind_hosts=tuple(_bind_host(nic, plan.provider, address_of) for nic in group.nics), cpus=group.cpus)
        for group in plan.groups
    )


def nic_distance(machine: Machine, seat: _Seat | PlannedDevice, nic: Nic) -> Distance:
    """From a GPU by PCI path, from a CPU rank by NUMA node."""
    if seat.gpu is not None:
        return distance(machine, seat.gpu.pci, nic.pci)
    return node_distance(seat.node, machine.node_of(nic.pci))


def _bind_host(nic: Nic, provider: Provider, address_of: AddressOf) -> str:
    if provider is Provider.EFA:
        return nic.name
    address = None if nic.interface is None else address_of(nic.interface)
    if address is None:
        raise ConfigError(
            f"{nic.name} has no IPv4 address, which {provider.value} binds to; "
            f"give {nic.interface or 'its network interface'} one (ip address add), or name another address to bind to"
        )
    return address


def _seats(machine: Machine, num_devices: int | None) -> list[_Seat]:
    if machine.gpus:
        count = len(machine.gpus) if num_devices is None else num_devices
        if count > len(machine.gpus):
            raise ConfigError(f"{count} devices were asked for, but this machine has {len(machine.gpus)} GPUs")
        return [_Seat(label=gpu.label, gpu=gpu, node=machine.node_of(gpu.pci)) for gpu in machine.gpus[:count]]
    nodes = [node.index for node in machine.nodes if node.cpus]
    count = len(nodes) if num_devices is None else num_devices
    # Ranks that follow each other share a node: neighbours exchange the most.
    return [
        _Seat(label=f"rank {rank}", gpu=None, node=nodes[rank * len(nodes) // max(count, len(nodes))])
        for rank in range(count)
    ]


def _share_nics(machine: Machine, seats: list[_Seat], nics: tuple[Nic, ...]) -> list[tuple[Nic, ...]]:
    """The NICs of each device: its nearest ones, equally shared between the devices that have them nearest.

    Those with the nearest NICs choose first, and each takes the NICs that the fewest have taken so far.
    """
    nearest = [_nearest(machine, seat, nics) for seat in seats]
    num_takers = dict.fromkeys(nics, 0)
    chosen: list[tuple[Nic, ...]] = [()] * len(seats)
    for index in sorted(range(len(seats)), key=lambda index: nearest[index][0]):
        near = nearest[index][1]
        num_rivals = sum(1 for _, others in nearest if set(near) & set(others))
        fair_share = max(1, len(near) // max(1, num_rivals))
        size = next(size for size in GROUP_SIZES if size <= fair_share)
        taken = sorted(near, key=lambda nic: num_takers[nic])[:size]
        chosen[index] = tuple(nic for nic in near if nic in taken)
        for nic in taken:
            num_takers[nic] += 1
    return chosen


def _nearest(machine: Machine, seat: _Seat, nics: tuple[Nic, ...]) -> tuple[Distance, tuple[Nic, ...]]:
    """The fastest of the NICs at the least distance, and that distance."""
    distances = {nic: nic_distance(machine, seat, nic) for nic in nics}
    least = min(distances.values(), default=Distance.SYS)
    near = [nic for nic in nics if distances[nic] is least]
    best_rate = max((nic.rate_gbps or 0.0 for nic in near), default=0.0)
    return least, tuple(nic for nic in near if (nic.rate_gbps or 0.0) == best_rate)


def _group_node(
    machine: Machine, index: int, group_nics: tuple[tuple[Nic, ...], ...], seats: list[_Seat], device_groups: list[int]
) -> int | None:
    """The node of a group's NICs; of the devices it serves when they don't say."""
    nodes = [machine.node_of(nic.pci) for nic in group_nics[index]]
    nodes += [seat.node for seat, group in zip(seats, device_groups, strict=True) if group == index]
    return next((node for node in nodes if node is not None), None)


def _distance_to_all(machine: Machine, seat: _Seat, nics: tuple[Nic, ...]) -> Distance:
    return max((nic_distance(machine, seat, nic) for nic in nics), default=Distance.SYS)

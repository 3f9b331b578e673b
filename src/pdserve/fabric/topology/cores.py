"""Shares out the cores of each NUMA node between fabric threads and ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.fabric.topology.machine import Machine
from pdserve.fabric.topology.nics import Provider

Core = tuple[int, ...]

MIN_CORES_TO_SPARE_ONE = {Provider.VERBS: 2, Provider.EFA: 2, Provider.TCP: 4}
"""Cores a rank must find on its node before its fabric thread gets one for itself.

With verbs and EFA the thread polls and would starve what it shares a core with. With tcp it sleeps while it waits, and
the rank, which then computes on the CPU, would miss the core more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreShares:
    groups: tuple[tuple[int, ...], ...]
    """CPUs of the fabric thread of each domain group."""
    devices: tuple[tuple[int, ...], ...]
    """CPUs of the rank of each device."""


def share_cores(
    machine: Machine,
    *,
    provider: Provider,
    group_nodes: Sequence[int | None],
    device_nodes: Sequence[int | None],
    device_groups: Sequence[int],
    allowed_cpus: frozenset[int],
) -> CoreShares:
    """CPUs on the node of each group's NICs and of each device, of those this process may use.

    `device_groups` gives the group of each device. Where a node is unknown or has no allowed CPUs, the node with the
    most stands in. Ensures: whole physical cores, none given twice, wherever a node has enough of them; on a node with
    fewer CPUs than devices all of them share all.
    """
    by_node = _cores_by_node(machine, allowed_cpus)
    fullest = max(by_node, key=lambda node: len(by_node[node]))
    group_homes = [node if node in by_node else fullest for node in group_nodes]
    device_homes = [node if node in by_node else fullest for node in device_nodes]
    groups: list[tuple[int, ...]] = [()] * len(group_nodes)
    devices: list[tuple[int, ...]] = [()] * len(device_nodes)
    for node, cores in by_node.items():
        near_groups = [index for index, home in enumerate(group_homes) if home == node]
        near_devices = [index for index, home in enumerate(device_homes) if home == node]
        spares_cores = len(cores) >= MIN_CORES_TO_SPARE_ONE[provider] * max(len(near_groups), len(near_devices), 1)
        num_for_ranks = len(cores) - len(near_groups) if spares_cores else len(cores)
        for position, index in enumerate(near_devices):
            devices[index] = _share(cores[:num_for_ranks], position, len(near_devices))
        for position, index in enumerate(near_groups):
            beside = {cpu for device in near_devices if device_groups[device] == index for cpu in devices[device]}
            if spares_cores:
                groups[index] = cores[num_for_ranks + position]
            else:
                groups[index] = tuple(sorted(beside)) or _share(cores, position, len(near_groups))
    return CoreShares(groups=tuple(groups), devices=tuple(devices))


def _cores_by_node(machine: Machine, allowed_cpus: frozenset[int]) -> dict[int, tuple[Core, ...]]:
    """The cores of each node, cut down to allowed CPUs; nodes without any left out."""
    by_node: dict[int, tuple[Core, ...]] = {}
    for node in machine.nodes:
        usable = allowed_cpus.intersection(node.cpus)
        cut = (tuple(cpu for cpu in core if cpu in usable) for core in machine.cores)
        if cores := tuple(core for core in cut if core):
            by_node[node.index] = cores
    return by_node


def _share(cores: tuple[Core, ...], position: int, num_shares: int) -> tuple[int, ...]:
    """One of `num_shares` equal shares, in whole cores where they suffice, else in CPUs, else everything."""
    if len(cores) >= num_shares:
        own = cores[position * len(cores) // num_shares : (position + 1) * len(cores) // num_shares]
        return tuple(sorted(cpu for core in own for cpu in core))
    cpus = tuple(cpu for core in cores for cpu in core)
    if len(cpus) >= num_shares:
        return cpus[position * len(cpus) // num_shares : (position + 1) * len(cpus) // num_shares]
    return tuple(sorted(cpus))

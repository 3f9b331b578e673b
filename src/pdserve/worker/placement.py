"""Which NICs and cores the ranks of a worker use: named by the operator, or the nearest ones."""

import os
from dataclasses import dataclass

from pdserve.config.worker import WorkerSettings
from pdserve.fabric.port import DomainGroup
from pdserve.fabric.topology.addresses import live_address
from pdserve.fabric.topology.nics import Provider
from pdserve.fabric.topology.plan import choose, domain_groups
from pdserve.fabric.topology.reading import LIVE_SYSFS, read_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Ranks count over the whole worker: data parallel rank times tensor parallel size, plus tensor parallel rank."""

    groups: tuple[DomainGroup, ...]
    group_indices: tuple[int, ...]
    """By rank: the group whose NICs read from it and write to it."""
    cpus: tuple[int, ...]
    """That the ranks share out among them, in equal runs; empty: not pinned."""


def place_ranks(settings: WorkerSettings) -> Placement:
    """One group of the named interfaces; without any, the NICs near each rank, and the cores near them.

    Raises: `ConfigError` when the topology gives no usable NIC, or fewer devices than ranks.
    """
    num_ranks = settings.data_parallel_size * settings.tensor_parallel_size
    if settings.fabric_hosts:
        group = DomainGroup(bind_hosts=settings.fabric_hosts)
        return Placement(groups=(group,), group_indices=(0,) * num_ranks, cpus=settings.cpus)
    plan = choose(
        read_machine(LIVE_SYSFS),
        num_devices=num_ranks,
        allowed_cpus=settings.cpus or os.sched_getaffinity(0),
        provider=Provider(settings.provider),
    )
    return Placement(
        groups=domain_groups(plan, live_address),
        group_indices=tuple(device.group_index for device in plan.devices),
        cpus=settings.cpus or tuple(cpu for device in plan.devices for cpu in device.cpus),
    )

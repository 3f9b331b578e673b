"""Everything there is to say of one machine, in one place for those who show it."""

import os
from dataclasses import dataclass
from pathlib import Path

from pdserve.fabric.topology.addresses import AddressOf, live_address
from pdserve.fabric.topology.findings import Finding, find
from pdserve.fabric.topology.machine import Machine
from pdserve.fabric.topology.nvml import list_gpus
from pdserve.fabric.topology.plan import Plan, choose
from pdserve.fabric.topology.reading import LIVE_SYSFS, read_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    source: str
    machine: Machine
    plan: Plan
    findings: tuple[Finding, ...]
    address_of: AddressOf | None
    """None: the machine is not this one, its addresses are unknown."""

    def address(self, interface: str | None) -> str | None:
        return None if interface is None or self.address_of is None else self.address_of(interface)


def survey_this_machine() -> Survey:
    """With NVML, IP addresses, and the CPUs that this process may use."""
    machine = read_machine(LIVE_SYSFS, listed_gpus=list_gpus())
    plan = choose(machine, allowed_cpus=os.sched_getaffinity(0))
    return Survey(
        source="this machine",
        machine=machine,
        plan=plan,
        findings=find(machine, plan, live_address),
        address_of=live_address,
    )


def survey_tree(sysfs: Path) -> Survey:
    """Of a copy of another machine's sysfs. Raises: `ConfigError` when it is none."""
    machine = read_machine(sysfs)
    plan = choose(machine)
    return Survey(source=str(sysfs), machine=machine, plan=plan, findings=find(machine, plan), address_of=None)

"""What was found, what is chosen and what looks wrong, as plain text for an operator."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import assert_never

from pdserve.fabric.topology.cpu_list import format_cpu_list
from pdserve.fabric.topology.distance import Distance, distance
from pdserve.fabric.topology.findings import Finding, link_text
from pdserve.fabric.topology.machine import Machine, NetInterface, PciFunction, RdmaDevice
from pdserve.fabric.topology.nics import Nic, Provider
from pdserve.fabric.topology.pci_names import pci_name
from pdserve.fabric.topology.plan import PlannedDevice
from pdserve.fabric.topology.survey import Survey

LINE_CHARS = 118
UNKNOWN = "?"


def render(survey: Survey) -> str:
    """Sections of aligned columns; the last one says what looks wrong."""
    machine, plan = survey.machine, survey.plan
    sections = {
        f"Topology of {survey.source}": _node_rows(machine),
        "GPUs": [_gpu_row(gpu.label, gpu.name, gpu.pci, machine) for gpu in machine.gpus],
        "RDMA NICs": [
            row for number, nic in enumerate(machine.rdma_devices) for row in _rdma_rows(number, nic, machine)
        ],
        "Network interfaces": [_interface_row(each, survey) for each in machine.interfaces],
        "Distances": _distance_rows(machine),
        f"Plan: provider {plan.provider.value}": [_plan_row(device, survey) for device in plan.devices],
    }
    lines = [line for title, rows in sections.items() if rows for line in (title, *_aligned(rows), "")]
    return "\n".join([*lines, "What looks wrong", *_finding_lines(survey.findings)])


def _node_rows(machine: Machine) -> list[Sequence[str]]:
    return [
        (
            f"node {node.index}",
            f"{sum(1 for core in machine.cores if set(core) & set(node.cpus))} cores",
            f"CPUs {format_cpu_list(node.cpus) or 'none'}",
        )
        for node in machine.nodes
    ]


def _gpu_row(label: str, name: str, pci: PciFunction, machine: Machine) -> Sequence[str]:
    return (label, name, pci.address, _node_text(machine, pci), f"PCIe {link_text(pci.link.speed_gts, pci.link.width)}")


def _rdma_rows(number: int, device: RdmaDevice, machine: Machine) -> Iterator[Sequence[str]]:
    """One row a port; a device without ports has one too."""
    interface = machine.interface_of(device)
    model = "software" if device.pci is None else pci_name(device.pci)
    place = UNKNOWN if device.pci is None else device.pci.address
    head = (str(number), device.name, model, place, _node_text(machine, device.pci))
    for port in device.ports:
        state = port.state if len(device.ports) == 1 else f"port {port.number} {port.state}"
        tail = (port.link_layer.value, port.rate_text, state, "" if interface is None else interface.name)
        yield (*head, *tail)
    if not device.ports:
        yield (*head, "", "", "no port")


def _interface_row(interface: NetInterface, survey: Survey) -> Sequence[str]:
    return (
        interface.name,
        "virtual" if interface.pci is None else pci_name(interface.pci),
        "" if interface.pci is None else _node_text(survey.machine, interface.pci),
        "up" if interface.is_up else "down",
        _rate_text(interface.rate_gbps),
        survey.address(interface.name) or "",
    )


def _distance_rows(machine: Machine) -> list[Sequence[str]]:
    """A row a GPU, a column for each run of NICs that are equally far from every GPU."""
    nics = [(number, device.pci) for number, device in enumerate(machine.rdma_devices) if device.pci is not None]
    if not machine.gpus or not nics:
        return []
    columns = [(number, tuple(distance(machine, gpu.pci, pci) for gpu in machine.gpus)) for number, pci in nics]
    runs = [([number for number, _ in run], far) for far, run in groupby(columns, key=lambda column: column[1])]
    rows: list[Sequence[str]] = [("NIC", *(format_cpu_list(numbers) for numbers, _ in runs))]
    rows += [(gpu.label, *(far[row].name for _, far in runs)) for row, gpu in enumerate(machine.gpus)]
    occurring = sorted({each for _, far in runs for each in far})
    return [*rows, *((f"{each.name}: {_meaning(each)}",) for each in occurring)]


def _meaning(value: Distance) -> str:
    match value:
        case Distance.PIX:
            return "behind one PCIe switch"
        case Distance.PXB:
            return "below one root port, over several PCIe switches"
        case Distance.PHB:
            return "below one host bridge, through the CPU"
        case Distance.NODE:
            return "on one NUMA node, over several host bridges"
        case Distance.SYS:
            return "on different NUMA nodes, or unknown ones"
        case _:
            assert_never(value)


def _plan_row(device: PlannedDevice, survey: Survey) -> Sequence[str]:
    group = survey.plan.groups[device.group_index]
    names = [_nic_text(nic, survey) for nic in group.nics]
    return (
        device.label,
        f"{' + '.join(names) or 'no NIC'} ({device.distance.name})",
        f"thread on CPUs {format_cpu_list(group.cpus)}",
        f"rank on CPUs {format_cpu_list(device.cpus)}",
    )


def _nic_text(nic: Nic, survey: Survey) -> str:
    if survey.plan.provider is Provider.EFA:
        return nic.name
    missing = "address unknown" if survey.address_of is None else "no address"
    return f"{nic.name} {survey.address(nic.interface) or missing}"


def _node_text(machine: Machine, pci: PciFunction | None) -> str:
    node = machine.node_of(pci)
    return f"node {UNKNOWN if node is None else node}"


def _rate_text(rate_gbps: float | None) -> str:
    return "" if rate_gbps is None else f"{rate_gbps:g} Gb/s"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as their widest cell, a row of one cell apart from them."""
    table = [row for row in rows if len(row) > 1]
    widths = [max(len(cell) for cell in column) for column in _columns(table)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False)) if len(row) > 1 else row
        yield f"  {'  '.join(cells)}".rstrip()


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    for index in range(max((len(row) for row in rows), default=0)):
        yield [row[index] for row in rows if index < len(row)]


def _finding_lines(findings: Iterable[Finding]) -> list[str]:
    wrapped = [
        line
        for finding in findings
        for line in textwrap.wrap(finding.text, LINE_CHARS, initial_indent="  - ", subsequent_indent="    ")
    ]
    return wrapped or ["  nothing looks wrong"]

"""The report as plain values that every JSON encoder takes, for programs. Keys end in their unit."""

from pdserve.fabric.topology.distance import distance
from pdserve.fabric.topology.machine import Gpu, Machine, RdmaDevice
from pdserve.fabric.topology.survey import Survey

Values = dict[str, object]


def values_of(survey: Survey) -> Values:
    machine = survey.machine
    return {
        "source": survey.source,
        "numa_nodes": [{"index": node.index, "cpus": list(node.cpus)} for node in machine.nodes],
        "gpus": [_gpu(gpu, machine) for gpu in machine.gpus],
        "rdma_devices": [_rdma_device(device, machine) for device in machine.rdma_devices],
        "interfaces": [
            {
                "name": interface.name,
                "is_up": interface.is_up,
                "rate_gbps": interface.rate_gbps,
                "numa_node": machine.node_of(interface.pci),
                "address": survey.address(interface.name),
            }
            for interface in machine.interfaces
        ],
        "plan": _plan(survey),
        "findings": [
            {"complaint": finding.complaint.value, "subject": finding.subject, "text": finding.text}
            for finding in survey.findings
        ],
    }


def _gpu(gpu: Gpu, machine: Machine) -> Values:
    return {
        "index": gpu.index,
        "name": gpu.name,
        "pci": gpu.pci.address,
        "numa_node": machine.node_of(gpu.pci),
        "distances": {
            device.name: distance(machine, gpu.pci, device.pci).name for device in machine.rdma_devices if device.pci
        },
    }


def _rdma_device(device: RdmaDevice, machine: Machine) -> Values:
    interface = machine.interface_of(device)
    return {
        "name": device.name,
        "pci": None if device.pci is None else device.pci.address,
        "numa_node": machine.node_of(device.pci),
        "interface": None if interface is None else interface.name,
        "ports": [
            {
                "number": port.number,
                "state": port.state,
                "link_layer": port.link_layer.value,
                "rate_gbps": port.rate_gbps,
            }
            for port in device.ports
        ],
    }


def _plan(survey: Survey) -> Values:
    return {
        "provider": survey.plan.provider.value,
        "groups": [
            {
                "nics": [nic.name for nic in group.nics],
                "addresses": [survey.address(nic.interface) for nic in group.nics],
                "cpus": list(group.cpus),
            }
            for group in survey.plan.groups
        ],
        "devices": [
            {
                "device": device.label,
                "group_index": device.group_index,
                "distance": device.distance.name,
                "cpus": list(device.cpus),
            }
            for device in survey.plan.devices
        ],
    }

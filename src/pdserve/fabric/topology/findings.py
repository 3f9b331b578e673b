"""What looks wrong about a machine and the plan for it, each with a sentence that says what to do."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from pdserve.fabric.topology.addresses import AddressOf
from pdserve.fabric.topology.cpu_list import format_cpu_list
from pdserve.fabric.topology.distance import Distance
from pdserve.fabric.topology.machine import Gpu, Machine, RdmaDevice
from pdserve.fabric.topology.nics import Nic, Provider
from pdserve.fabric.topology.plan import Plan, PlannedDevice


class Complaint(Enum):
    NO_NETWORK = "no_network"
    TCP_FALLBACK = "tcp_fallback"
    NO_RDMA = "no_rdma"
    NO_ADDRESS = "no_address"
    PORT_DOWN = "port_down"
    SLOW_PORT = "slow_port"
    FAR_NIC = "far_nic"
    SHARED_NIC = "shared_nic"
    DEGRADED_LINK = "degraded_link"
    UNKNOWN_NODE = "unknown_node"
    FAR_CPUS = "far_cpus"
    SHARED_CPUS = "shared_cpus"
    SHARED_CORE = "shared_core"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    complaint: Complaint
    subject: str
    """What it is about: the name of a device, or `network`, or CPUs."""
    text: str


def find(machine: Machine, plan: Plan, address_of: AddressOf | None = None) -> tuple[Finding, ...]:
    """What looks wrong, the weightiest first. Without `address_of`, IP addresses are not looked at."""
    return (
        *_network(machine, plan),
        *(_addresses(plan, address_of) if address_of is not None else ()),
        *_ports(machine),
        *_slow_ports(machine, plan),
        *_far_nics(machine, plan),
        *_shared_nics(plan),
        *_links(machine, plan),
        *_unknown_nodes(machine, plan),
        *_far_cpus(machine, plan),
        *_shared_cpus(plan),
        *_shared_cores(machine, plan),
    )


def link_text(speed_gts: float | None, width: int | None) -> str:
    speed = "unknown speed" if speed_gts is None else f"{speed_gts:g} GT/s"
    return speed if width is None else f"{speed} x{width}"


def _network(machine: Machine, plan: Plan) -> Iterator[Finding]:
    physical = [device for device in machine.rdma_devices if device.pci is not None]
    if not all(group.nics for group in plan.groups):
        text = "no network interface is up, not even lo: bring one up (ip link set NAME up)"
        yield Finding(complaint=Complaint.NO_NETWORK, subject="network", text=text)
    elif plan.provider is Provider.TCP and physical:
        text = (
            f"KV pages go over tcp although there are RDMA NICs ({_names(physical)}): none has an active port; bring "
            "the links up, or expect a fraction of the bandwidth"
        )
        yield Finding(complaint=Complaint.TCP_FALLBACK, subject="network", text=text)
    elif plan.provider is Provider.TCP:
        text = (
            "there is no RDMA NIC, so KV pages go over tcp: fine on one machine and to try things out; between "
            "machines fit ConnectX or EFA NICs, or load their driver if they are there"
        )
        yield Finding(complaint=Complaint.NO_RDMA, subject="network", text=text)


def _addresses(plan: Plan, address_of: AddressOf) -> Iterator[Finding]:
    for nic in _chosen_nics(plan) if plan.provider is not Provider.EFA else ():
        if nic.interface is None or address_of(nic.interface) is None:
            where = nic.interface or "a network interface on it"
            text = (
                f"{nic.name} has no IPv4 address, which {plan.provider.value} binds to: give {where} one (ip address "
                "add)"
            )
            yield Finding(complaint=Complaint.NO_ADDRESS, subject=nic.name, text=text)


def _ports(machine: Machine) -> Iterator[Finding]:
    for device in machine.rdma_devices:
        if device.pci is not None and device.best_port is None:
            states = ", ".join(f"port {port.number} is {port.state}" for port in device.ports) or "it shows no port"
            text = (
                f"{device.name} can't be used, {states}: check cable and switch port, and on InfiniBand the subnet "
                "manager"
            )
            yield Finding(complaint=Complaint.PORT_DOWN, subject=device.name, text=text)


def _slow_ports(machine: Machine, plan: Plan) -> Iterator[Finding]:
    """NICs slower than the fastest chosen one: sysfs does not say what a port could do at best."""
    chosen = _chosen_nics(plan) if plan.provider is not Provider.TCP else ()
    best_gbps = max((nic.rate_gbps or 0.0 for nic in chosen), default=0.0)
    ports = {device.name: device.best_port for device in machine.rdma_devices}
    for nic in chosen:
        port = ports.get(nic.name)
        if port is not None and nic.rate_gbps is not None and nic.rate_gbps < best_gbps:
            text = (
                f"{nic.name} runs at {port.rate_text} while others here run at {best_gbps:g} Gb/s, and a handoff is as "
                "slow as its slowest NIC: check cable, transceiver and the speed of the switch port"
            )
            yield Finding(complaint=Complaint.SLOW_PORT, subject=nic.name, text=text)


def _far_nics(machine: Machine, plan: Plan) -> Iterator[Finding]:
    for device in plan.devices:
        nics = plan.groups[device.group_index].nics
        is_known = device.node is not None and all(machine.node_of(nic.pci) is not None for nic in nics)
        if device.gpu is not None and nics and is_known and device.distance is Distance.SYS:
            text = (
                f"{device.label} has no usable NIC on its NUMA node {device.node} and writes through {_names(nics)} "
                "across the sockets: bring up the NIC beside it, or move one to a slot of that node"
            )
            yield Finding(complaint=Complaint.FAR_NIC, subject=device.label, text=text)


def _shared_nics(plan: Plan) -> Iterator[Finding]:
    users: dict[Nic, list[PlannedDevice]] = {}
    for device in plan.devices:
        for nic in plan.groups[device.group_index].nics if device.gpu is not None else ():
            users.setdefault(nic, []).append(device)
    for nic, devices in users.items():
        if len(devices) > 1:
            labels = ", ".join(device.label for device in devices)
            text = (
                f"{len(devices)} GPUs ({labels}) share {nic.name}, and each gets a part of its bandwidth: bring up or "
                "fit more NICs near them"
            )
            yield Finding(complaint=Complaint.SHARED_NIC, subject=nic.name, text=text)


def _links(machine: Machine, plan: Plan) -> Iterator[Finding]:
    for name, device in _named_devices(machine, plan).items():
        if device.pci is None:
            continue
        link = device.pci.link
        is_narrow = link.width is not None and link.max_width is not None and link.width < link.max_width
        is_slow = link.speed_gts is not None and link.max_speed_gts is not None and link.speed_gts < link.max_speed_gts
        # GPUs lower the speed of their link, not its width, while they are idle.
        if is_narrow or (is_slow and not isinstance(device, Gpu)):
            text = (
                f"{name} ({device.pci.address}) runs its PCIe link at {link_text(link.speed_gts, link.width)} and "
                f"could do {link_text(link.max_speed_gts, link.max_width)}: reseat it, or move it to a slot that can "
                "do this"
            )
            yield Finding(complaint=Complaint.DEGRADED_LINK, subject=name, text=text)


def _unknown_nodes(machine: Machine, plan: Plan) -> Iterator[Finding]:
    devices = _named_devices(machine, plan).items()
    unknown = [name for name, device in devices if device.pci is not None and machine.node_of(device.pci) is None]
    if unknown:
        text = (
            f"the firmware does not say on which of the {len(machine.nodes)} NUMA nodes these are, so nothing can be "
            f"placed beside them: {', '.join(unknown)}; turn NUMA on in the firmware, or in the hypervisor's settings"
        )
        yield Finding(complaint=Complaint.UNKNOWN_NODE, subject=", ".join(unknown), text=text)


def _far_cpus(machine: Machine, plan: Plan) -> Iterator[Finding]:
    for group in plan.groups:
        nodes = {machine.node_of(nic.pci) for nic in group.nics}
        near = {cpu for node in machine.nodes if node.index in nodes for cpu in node.cpus}
        if near and not near.intersection(group.cpus):
            text = (
                f"the thread that drives {_names(group.nics)} would run on CPUs {format_cpu_list(group.cpus)}, far "
                f"from them: allow CPUs of {format_cpu_list(near)} (taskset, cpuset or the container's settings)"
            )
            yield Finding(complaint=Complaint.FAR_CPUS, subject=group.nics[0].name, text=text)


def _shared_cpus(plan: Plan) -> Iterator[Finding]:
    uses = Counter(cpu for device in plan.devices for cpu in device.cpus)
    crowded = [cpu for cpu, num_devices in uses.items() if num_devices > 1]
    if crowded:
        text = (
            f"there are more devices than CPUs for them, and several share CPUs {format_cpu_list(crowded)}: allow more "
            "CPUs, or serve with fewer devices"
        )
        yield Finding(complaint=Complaint.SHARED_CPUS, subject=f"CPUs {format_cpu_list(crowded)}", text=text)


def _shared_cores(machine: Machine, plan: Plan) -> Iterator[Finding]:
    """Physical cores on which the threads of several groups poll; with tcp they sleep."""
    for core in machine.cores if plan.provider is not Provider.TCP else ():
        pollers = [group for group in plan.groups if set(core).intersection(group.cpus)]
        if len(pollers) > 1:
            names = " and ".join(_names(group.nics) for group in pollers)
            text = (
                f"the polling threads of {names} share one physical core (CPUs {format_cpu_list(core)}) and slow each "
                "other down: allow more cores on their NUMA node"
            )
            yield Finding(complaint=Complaint.SHARED_CORE, subject=f"CPUs {format_cpu_list(core)}", text=text)


def _chosen_nics(plan: Plan) -> tuple[Nic, ...]:
    return tuple(dict.fromkeys(nic for group in plan.groups for nic in group.nics))


def _named_devices(machine: Machine, plan: Plan) -> dict[str, Gpu | Nic]:
    return {nic.name: nic for nic in _chosen_nics(plan)} | {gpu.label: gpu for gpu in machine.gpus}


def _names(devices: Iterable[Nic] | Iterable[RdmaDevice]) -> str:
    return ", ".join(device.name for device in devices)

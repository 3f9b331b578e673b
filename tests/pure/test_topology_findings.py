"""What looks wrong, on copies of the recorded machines that have been spoilt."""

import shutil
from pathlib import Path

import pytest
from tests.pure.topology_machines import copy_of, machine

from pdserve.fabric.topology.findings import Complaint, Finding, find
from pdserve.fabric.topology.machine import Machine
from pdserve.fabric.topology.nics import Provider
from pdserve.fabric.topology.plan import choose
from pdserve.fabric.topology.reading import read_machine

NODE_0 = range(56)


def findings_of(tree: Path, *, allowed_cpus: range | None = None) -> dict[Complaint, list[Finding]]:
    """By complaint, in the order in which they are told."""
    return by_complaint(read_machine(tree), allowed_cpus=allowed_cpus)


def by_complaint(found: Machine, *, allowed_cpus: range | None = None) -> dict[Complaint, list[Finding]]:
    findings: dict[Complaint, list[Finding]] = {}
    for finding in find(found, choose(found, allowed_cpus=allowed_cpus)):
        findings.setdefault(finding.complaint, []).append(finding)
    return findings


@pytest.fixture
def server(tmp_path: Path) -> Path:
    return copy_of("hgx_h100", tmp_path)


def bring_down(server: Path, name: str) -> None:
    (server / f"class/infiniband/{name}/ports/1/state").write_text("1: DOWN\n")


def test_servers_as_recorded_have_nothing_wrong(server: Path, tmp_path: Path) -> None:
    assert findings_of(server) == {}
    assert findings_of(copy_of("p5_efa", tmp_path)) == {}


def test_laptop_without_rdma_is_told_that_pages_go_over_tcp(tmp_path: Path) -> None:
    found = findings_of(copy_of("laptop", tmp_path))
    assert list(found) == [Complaint.NO_RDMA]


def test_port_that_is_down_is_told_with_the_nic_that_gpus_then_share(server: Path) -> None:
    bring_down(server, "mlx5_0")
    found = findings_of(server)
    assert list(found) == [Complaint.PORT_DOWN, Complaint.SHARED_NIC]
    assert "mlx5_0 can't be used, port 1 is DOWN" in found[Complaint.PORT_DOWN][0].text
    assert "2 GPUs (GPU0, GPU1) share mlx5_2" in found[Complaint.SHARED_NIC][0].text


def test_all_nics_of_a_node_down_leave_its_gpus_without_a_near_one(server: Path) -> None:
    for index in (0, 2, 3, 4):
        bring_down(server, f"mlx5_{index}")
    found = findings_of(server)
    far = found[Complaint.FAR_NIC]
    assert [finding.subject for finding in far] == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert "no usable NIC on its NUMA node 0" in far[0].text
    assert len(found[Complaint.SHARED_NIC]) == 4


def test_all_ports_down_fall_back_to_tcp_and_name_the_nics(server: Path) -> None:
    for index in range(10):
        bring_down(server, f"mlx5_{index}")
    found = findings_of(server)
    assert choose(read_machine(server)).provider is Provider.TCP
    assert "although there are RDMA NICs (mlx5_0, mlx5_1," in found[Complaint.TCP_FALLBACK][0].text
    assert Complaint.NO_RDMA not in found


def test_port_below_the_rate_of_the_others_is_told_with_its_width(server: Path) -> None:
    (server / "class/infiniband/mlx5_3/ports/1/rate").write_text("200 Gb/sec (2X NDR)\n")
    (finding,) = findings_of(server)[Complaint.SLOW_PORT]
    assert finding.subject == "mlx5_3"
    assert "200 Gb/sec (2X NDR) while others here run at 400 Gb/s" in finding.text


@pytest.mark.parametrize(
    ("address", "file", "value", "subject", "said"),
    [
        ("0000:18:00.0", "current_link_width", "8", "mlx5_0", "at 32 GT/s x8 and could do 32 GT/s x16"),
        ("0000:18:00.0", "current_link_speed", "16.0 GT/s PCIe", "mlx5_0", "at 16 GT/s x16"),
        ("0000:1b:00.0", "current_link_width", "4", "GPU0", "GPU0 (0000:1b:00.0) runs its PCIe link at 32 GT/s x4"),
    ],
)
def test_degraded_link_is_told_with_what_it_could_do(
    server: Path, address: str, file: str, value: str, subject: str, said: str
) -> None:
    (server / f"bus/pci/devices/{address}/{file}").write_text(f"{value}\n")
    (finding,) = findings_of(server)[Complaint.DEGRADED_LINK]
    assert finding.subject == subject
    assert said in finding.text


def test_gpu_that_idles_at_a_lower_link_speed_is_not_told(server: Path) -> None:
    (server / "bus/pci/devices/0000:1b:00.0/current_link_speed").write_text("2.5 GT/s PCIe\n")
    assert findings_of(server) == {}


@pytest.mark.parametrize("width", ["255", "0"])
def test_link_width_as_virtual_functions_report_it_is_not_told(server: Path, width: str) -> None:
    (server / "bus/pci/devices/0000:18:00.0/max_link_width").write_text("255\n")
    (server / "bus/pci/devices/0000:18:00.0/current_link_width").write_text(f"{width}\n")
    assert findings_of(server) == {}


def test_link_of_a_storage_nic_that_is_not_used_is_not_told(server: Path) -> None:
    (server / "bus/pci/devices/0000:29:00.0/current_link_width").write_text("8\n")
    assert findings_of(server) == {}


def test_numa_node_that_is_unknown_is_told_once_for_all_devices(server: Path) -> None:
    for address in ("0000:1b:00.0", "0000:18:00.0"):
        (server / f"bus/pci/devices/{address}/numa_node").write_text("-1\n")
    found = findings_of(server)
    assert list(found) == [Complaint.UNKNOWN_NODE]
    assert "on which of the 2 NUMA nodes these are" in found[Complaint.UNKNOWN_NODE][0].text
    assert found[Complaint.UNKNOWN_NODE][0].subject == "mlx5_0, GPU0"


def test_cpus_allowed_on_one_node_only_are_told_for_the_nics_of_the_other(server: Path) -> None:
    found = findings_of(server, allowed_cpus=NODE_0)
    assert [finding.subject for finding in found[Complaint.FAR_CPUS]] == ["mlx5_5", "mlx5_7", "mlx5_8", "mlx5_9"]
    assert "allow CPUs of 56-111,168-223" in found[Complaint.FAR_CPUS][0].text


def test_fewer_cores_than_polling_threads_are_told_with_the_core_they_share() -> None:
    found = by_complaint(machine(node_cores=[1], gpu_nodes=[0, 0], nic_nodes=[0, 0]))
    assert list(found) == [Complaint.SHARED_CORE]
    assert "mlx5_0 and mlx5_1 share one physical core (CPUs 0-1)" in found[Complaint.SHARED_CORE][0].text


def test_fewer_cpus_than_devices_are_told() -> None:
    found = by_complaint(machine(node_cores=[1], gpu_nodes=[0] * 3, nic_nodes=[0] * 3))
    assert "several share CPUs 0-1" in found[Complaint.SHARED_CPUS][0].text


def test_machine_without_any_interface_is_told_so(tmp_path: Path) -> None:
    tree = copy_of("laptop", tmp_path)
    shutil.rmtree(tree / "class")
    assert list(findings_of(tree)) == [Complaint.NO_NETWORK]


def test_nic_without_an_address_is_told_with_its_interface(server: Path) -> None:
    found = read_machine(server)
    addresses = {f"ibp{bus}s0": "10.0.0.1" for bus in (24, 64, 79, 94, 154, 192, 206)}
    (finding,) = find(found, choose(found), addresses.get)
    assert finding.complaint is Complaint.NO_ADDRESS
    assert "mlx5_9 has no IPv4 address, which verbs binds to: give ibp220s0 one" in finding.text


def test_efa_devices_without_addresses_are_not_told(tmp_path: Path) -> None:
    found = read_machine(copy_of("p5_efa", tmp_path))
    assert find(found, choose(found), lambda interface: None) == ()

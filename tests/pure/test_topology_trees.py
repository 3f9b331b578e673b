"""What is found and chosen on the recorded machines."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.pure.topology_machines import TREE_NAMES, TREES, copy_of

from pdserve.errors import ConfigError
from pdserve.fabric.topology.addresses import live_address
from pdserve.fabric.topology.distance import Distance
from pdserve.fabric.topology.nics import Provider
from pdserve.fabric.topology.nvml import ListedGpu, sysfs_address
from pdserve.fabric.topology.plan import Plan, choose, domain_groups
from pdserve.fabric.topology.reading import read_machine
from pdserve.fabric.topology.report import render
from pdserve.fabric.topology.survey import survey_this_machine, survey_tree

UPDATE = "PDSERVE_TESTS_UPDATE"


def nic_names(plan: Plan) -> list[list[str]]:
    """By device."""
    return [[nic.name for nic in plan.groups[device.group_index].nics] for device in plan.devices]


@pytest.mark.parametrize("name", TREE_NAMES)
def test_report_of_each_recorded_tree_equals_the_golden_one(name: str) -> None:
    report = f"{render(replace(survey_tree(TREES / name), source=name))}\n"
    golden = TREES / f"{name}.txt"
    if os.environ.get(UPDATE):
        golden.write_text(report)
    assert report == golden.read_text()


def test_plan_of_the_connectx_server_gives_each_gpu_the_400g_nic_beside_it() -> None:
    plan = choose(read_machine(TREES / "hgx_h100"))
    assert plan.provider is Provider.VERBS
    assert nic_names(plan) == [[f"mlx5_{index}"] for index in (0, 2, 3, 4, 5, 7, 8, 9)]
    assert {device.distance for device in plan.devices} == {Distance.PXB}


def test_plan_of_the_efa_server_gives_each_gpu_four_devices_behind_its_switch() -> None:
    plan = choose(read_machine(TREES / "p5_efa"))
    assert plan.provider is Provider.EFA
    assert nic_names(plan)[0] == ["rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0"]
    assert nic_names(plan)[7] == ["rdmap198s0", "rdmap199s0", "rdmap200s0", "rdmap201s0"]
    assert {device.distance for device in plan.devices} == {Distance.PIX}


def test_plan_of_the_laptop_is_one_rank_over_wifi() -> None:
    plan = choose(read_machine(TREES / "laptop"))
    assert plan.provider is Provider.TCP
    assert nic_names(plan) == [["wlp0s20f3"]]


@pytest.mark.parametrize("name", ["hgx_h100", "p5_efa"])
def test_plan_of_a_server_keeps_threads_and_ranks_on_their_node_and_apart(name: str) -> None:
    machine = read_machine(TREES / name)
    plan = choose(machine)
    given = [cpu for user in (*plan.groups, *plan.devices) for cpu in user.cpus]
    assert len(given) == len(set(given))
    for device in plan.devices:
        (node,) = (node for node in machine.nodes if node.index == device.node)
        assert set(device.cpus) < set(node.cpus)
        assert set(plan.groups[device.group_index].cpus) < set(node.cpus)


def test_plan_for_two_of_eight_gpus_leaves_the_others_out() -> None:
    plan = choose(read_machine(TREES / "hgx_h100"), num_devices=2)
    assert [device.label for device in plan.devices] == ["GPU0", "GPU1"]


def test_plan_for_more_devices_than_gpus_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"9 devices .* has 8 GPUs"):
        choose(read_machine(TREES / "hgx_h100"), num_devices=9)


def test_plan_when_the_nic_beside_a_gpu_is_gone_shares_another_of_the_node(tmp_path: Path) -> None:
    tree = copy_of("hgx_h100", tmp_path)
    (tree / "class/infiniband/mlx5_2").unlink()
    plan = choose(read_machine(tree))
    assert plan.devices[1].distance is Distance.NODE
    assert nic_names(plan)[1] == nic_names(plan)[0]
    assert plan.devices[1].group_index == plan.devices[0].group_index


def test_plan_when_the_nic_beside_a_gpu_is_gone_takes_the_fastest_of_the_node(tmp_path: Path) -> None:
    tree = copy_of("hgx_h100", tmp_path)
    (tree / "class/infiniband/mlx5_0").unlink()
    (tree / "class/infiniband/mlx5_2/ports/1/rate").write_text("200 Gb/sec (2X NDR)\n")
    assert nic_names(choose(read_machine(tree)))[:2] == [["mlx5_3"], ["mlx5_2"]]


def test_plan_over_tcp_prefers_a_physical_interface_to_a_bridge_that_is_up(tmp_path: Path) -> None:
    tree = copy_of("laptop", tmp_path)
    (tree / "class/net/docker0/operstate").write_text("up\n")
    assert nic_names(choose(read_machine(tree))) == [["wlp0s20f3"]]
    (tree / "class/net/wlp0s20f3/operstate").write_text("down\n")
    assert nic_names(choose(read_machine(tree))) == [["docker0"]]
    (tree / "class/net/docker0/operstate").write_text("down\n")
    assert nic_names(choose(read_machine(tree))) == [["lo"]]


def test_virtual_functions_beside_their_physical_one_are_not_chosen(tmp_path: Path) -> None:
    tree = copy_of("hgx_h100", tmp_path)
    physical = (tree / "bus/pci/devices/0000:18:00.0").resolve()
    virtual = physical.with_name("0000:18:00.1")
    (virtual / "infiniband/mlx5_10/ports/1").mkdir(parents=True)
    (virtual / "uevent").write_text("DRIVER=mlx5_core\nPCI_CLASS=20700\nPCI_ID=15B3:101E\n")
    (virtual / "physfn").symlink_to(physical)
    for file in ("state", "rate", "link_layer"):
        (virtual / f"infiniband/mlx5_10/ports/1/{file}").symlink_to(physical / f"infiniband/mlx5_0/ports/1/{file}")
    (tree / "bus/pci/devices/0000:18:00.1").symlink_to(virtual)
    (tree / "class/infiniband/mlx5_10").symlink_to(virtual / "infiniband/mlx5_10")
    machine = read_machine(tree)
    assert machine.rdma_devices[-1].name == "mlx5_10"
    assert nic_names(choose(machine))[0] == ["mlx5_0"]


def test_gpus_listed_by_nvml_take_its_order_and_names() -> None:
    found = read_machine(TREES / "hgx_h100").gpus
    listed = [ListedGpu(pci_address=gpu.pci.address, name="NVIDIA H100") for gpu in reversed(found)]
    gpus = read_machine(TREES / "hgx_h100", listed_gpus=listed).gpus
    assert [gpu.pci.address for gpu in gpus] == [gpu.pci.address for gpu in reversed(found)]
    assert [gpu.index for gpu in gpus] == list(range(8))
    assert {gpu.name for gpu in gpus} == {"NVIDIA H100"}


@pytest.mark.parametrize(
    ("nvml", "sysfs"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("00010000:1B:00.0", "10000:1b:00.0"),
        ("0000:1B:00.0", "0000:1b:00.0"),
    ],
)
def test_address_as_nvml_writes_it_becomes_that_of_sysfs(nvml: str, sysfs: str) -> None:
    assert sysfs_address(nvml) == sysfs


def test_domain_groups_of_verbs_bind_to_the_address_of_each_nic() -> None:
    plan = choose(read_machine(TREES / "hgx_h100"), num_devices=2)
    groups = domain_groups(plan, {"ibp24s0": "10.1.0.1", "ibp64s0": "10.1.0.2"}.get)
    assert [group.bind_hosts for group in groups] == [("10.1.0.1",), ("10.1.0.2",)]
    assert [group.cpus for group in groups] == [group.cpus for group in plan.groups]


def test_domain_groups_of_efa_name_the_devices() -> None:
    groups = domain_groups(choose(read_machine(TREES / "p5_efa"), num_devices=1), lambda interface: None)
    assert [group.bind_hosts for group in groups] == [("rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0")]


def test_domain_groups_of_a_nic_without_address_are_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"mlx5_0 has no IPv4 address.*give ibp24s0 one"):
        domain_groups(choose(read_machine(TREES / "hgx_h100")), lambda interface: None)


def test_live_machine_is_read_and_planned_over_interfaces_that_are_up() -> None:
    survey = survey_this_machine()
    assert set(survey.plan.groups[0].cpus) <= os.sched_getaffinity(0)
    assert all(device.label in render(survey) for device in survey.plan.devices)


def test_live_address_of_loopback_is_known_and_of_nonsense_is_not() -> None:
    assert live_address("lo") == "127.0.0.1"
    assert live_address("no-such-nic") is None
    assert live_address("longer-than-the-kernel-allows") is None

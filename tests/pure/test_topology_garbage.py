"""sysfs comes from outside: whatever a tree holds, it is read, planned and shown, or refused with one line."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pure.topology_machines import TREES, copy_of

from pdserve.errors import ConfigError
from pdserve.fabric.topology.reading import read_machine
from pdserve.fabric.topology.report import render
from pdserve.fabric.topology.survey import survey_tree
from pdserve.fabric.topology.values import values_of

GARBAGE = (
    b"",
    b"-1\n",
    b"x",
    b"0x",
    b"9" * 5000,
    b"4:",
    b"=",
    b"PCI_ID=:",
    b"PCI_ID=10DE:2330\nPCI_CLASS=zz",
    b"\x00\xff",
    b"\x1b[31m",
    b"0-",
    b"1e9",
    "٣".encode(),
)
FILES = sorted(
    str(path.relative_to(TREES / "hgx_h100"))
    for path in (TREES / "hgx_h100").rglob("*")
    if path.is_file() and not path.is_symlink() and "thread_siblings" not in path.name
)


def report_of(tree: Path) -> str:
    survey = survey_tree(tree)
    values_of(survey)
    return render(survey)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of("hgx_h100", tmp_path_factory.mktemp("spoilt"))


@given(spoilt=st.dictionaries(st.sampled_from(FILES), st.sampled_from(GARBAGE), min_size=1, max_size=8))
def test_garbage_in_any_files_still_gives_a_printable_report(server: Path, spoilt: dict[str, bytes]) -> None:
    right = {path: (server / path).read_bytes() for path in spoilt}
    try:
        for path, garbage in spoilt.items():
            (server / path).write_bytes(garbage)
        report = report_of(server)
    except ConfigError as refused:
        assert "is no sysfs" in refused.message
        return
    finally:
        for path, content in right.items():
            (server / path).write_bytes(content)
    assert all(line.isprintable() for line in report.splitlines())


def test_folders_where_files_belong_and_broken_links_are_passed_over(tmp_path: Path) -> None:
    tree = copy_of("hgx_h100", tmp_path)
    rate = tree / "class/infiniband/mlx5_0/ports/1/rate"
    rate.unlink()
    rate.mkdir()
    (tree / "class/infiniband/mlx5_99").symlink_to("mlx5_99")
    (tree / "class/net/gone0").symlink_to("../../devices/gone")
    (tree / "bus/pci/devices/0000:ff:00.0").symlink_to(os.devnull)
    assert "mlx5_99" in report_of(tree)


def test_links_that_lead_out_of_the_tree_give_no_pci_device(tmp_path: Path) -> None:
    tree = copy_of("laptop", tmp_path)
    (tree / "class/infiniband").mkdir()
    (tree / "class/infiniband/mlx5_0").symlink_to(TREES / "hgx_h100/class/infiniband/mlx5_0")
    (device,) = read_machine(tree).rdma_devices
    assert device.pci is None


def test_machine_whose_nodes_do_not_add_up_has_one_node(tmp_path: Path) -> None:
    tree = copy_of("hgx_h100", tmp_path)
    (tree / "devices/system/node/node1/cpulist").write_text("0-3\n")
    (node,) = read_machine(tree).nodes
    assert len(node.cpus) == 224


def test_cpus_that_are_offline_are_left_out(tmp_path: Path) -> None:
    tree = copy_of("laptop", tmp_path)
    (tree / "devices/system/cpu/online").write_text("0-2,4-7\n")
    machine = read_machine(tree)
    assert machine.nodes[0].cpus == (0, 1, 2, 4, 5, 6, 7)
    assert (2,) in machine.cores


@pytest.mark.parametrize("content", [None, "", "garbage"])
def test_folder_that_is_no_sysfs_is_refused_with_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "devices/system/cpu").mkdir(parents=True)
        (tmp_path / "devices/system/cpu/online").write_text(content)
    with pytest.raises(ConfigError, match=r"is no sysfs: .* name a directory such as /sys"):
        read_machine(tmp_path)

"""NICs and cores are shared out fairly, whatever the machine."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from tests.pure.topology_machines import machine

from pdserve.fabric.topology.machine import Machine
from pdserve.fabric.topology.nics import usable_nics
from pdserve.fabric.topology.plan import GROUP_SIZES, choose, nic_distance

nodes = st.one_of(st.none(), st.integers(0, 1))
machines = st.builds(
    machine,
    node_cores=st.lists(st.integers(1, 12), min_size=2, max_size=2),
    gpu_nodes=st.lists(nodes, min_size=1, max_size=8),
    nic_nodes=st.lists(nodes, min_size=1, max_size=12),
    threads_per_core=st.integers(1, 2),
)


@given(machines)
def test_every_device_has_nics_at_the_least_distance_there_is(found: Machine) -> None:
    plan = choose(found)
    every = usable_nics(found, plan.provider)
    for device in plan.devices:
        chosen = plan.groups[device.group_index].nics
        assert len(chosen) in GROUP_SIZES
        assert len({nic.name for nic in chosen}) == len(chosen)
        assert all(
            nic_distance(found, device, nic) <= nic_distance(found, device, other) for nic in chosen for other in every
        )


@given(num_gpus=st.integers(1, 8), num_nics=st.integers(1, 16))
def test_nics_equally_near_to_all_gpus_are_shared_equally(num_gpus: int, num_nics: int) -> None:
    plan = choose(machine(node_cores=[32], gpu_nodes=[0] * num_gpus, nic_nodes=[0] * num_nics))
    uses = Counter(nic for device in plan.devices for nic in plan.groups[device.group_index].nics)
    assert len({len(plan.groups[device.group_index].nics) for device in plan.devices}) == 1
    assert max(uses.values()) - (min(uses.values()) if len(uses) == num_nics else 0) <= 1


@given(machines)
def test_cores_are_never_given_twice_where_a_node_has_enough(found: Machine) -> None:
    plan = choose(found)
    has_enough = all(
        sum(1 for core in found.cores if set(core) <= set(node.cpus)) >= 2 * (len(plan.devices) + len(plan.groups))
        for node in found.nodes
    )
    given = [cpu for user in (*plan.groups, *plan.devices) for cpu in user.cpus]
    assert all(user.cpus for user in (*plan.groups, *plan.devices))
    if has_enough:
        assert len(given) == len(set(given))
        for core in found.cores:
            assert sum(1 for user in (*plan.groups, *plan.devices) if set(core) & set(user.cpus)) <= 1


def test_fabric_thread_without_a_core_for_itself_runs_beside_all_its_ranks() -> None:
    plan = choose(machine(node_cores=[3], gpu_nodes=[0, 0, 0], nic_nodes=[0, 0]))
    assert [device.group_index for device in plan.devices] == [0, 1, 0]
    assert plan.groups[0].cpus == tuple(sorted(plan.devices[0].cpus + plan.devices[2].cpus))
    assert plan.groups[1].cpus == plan.devices[1].cpus


@given(machines, st.sets(st.integers(0, 23), min_size=1))
def test_cores_given_are_allowed_ones(found: Machine, allowed: set[int]) -> None:
    online = {cpu for core in found.cores for cpu in core}
    plan = choose(found, allowed_cpus=allowed)
    usable = allowed & online or online
    assert all(set(user.cpus) <= usable for user in (*plan.groups, *plan.devices))


@given(num_ranks=st.integers(1, 20), node_cores=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_cpu_ranks_are_spread_over_nodes_in_order(num_ranks: int, node_cores: list[int]) -> None:
    plan = choose(machine(node_cores=node_cores, gpu_nodes=[], nic_nodes=[]), num_devices=num_ranks)
    placed = [device.node for device in plan.devices]
    assert placed == sorted(placed, key=lambda node: node or 0)
    counts = Counter(placed)
    assert max(counts.values()) - min(counts[index] for index in range(min(len(node_cores), num_ranks))) <= 1

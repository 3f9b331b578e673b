"""What a worker's fabric binds to, by the flags and the provider."""

import pytest

from pdserve.cli.worker import chosen_fabric_hosts

AUTO: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("named", "provider", "expected"),
    [
        (None, "tcp", ("10.0.0.2",)),
        (None, "verbs", ("10.0.0.2",)),
        (None, "efa", AUTO),
        (AUTO, "tcp", AUTO),
        (("rdmap0s6",), "efa", ("rdmap0s6",)),
        (("10.0.1.7", "10.0.2.7"), "verbs", ("10.0.1.7", "10.0.2.7")),
    ],
)
def test_fabric_hosts_unless_named_are_the_host_or_chosen_for_efa(
    named: tuple[str, ...] | None, provider: str, expected: tuple[str, ...]
) -> None:
    assert chosen_fabric_hosts(named, provider=provider, host="10.0.0.2") == expected

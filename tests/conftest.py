"""What all tests share: how hypothesis runs, and why tests for absent hardware are skipped."""

from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent

# No deadline for one example: the machines that run this are shared. A failing example is printed so that it replays.
settings.register_profile("pdserve", deadline=None, print_blob=True)
settings.load_profile("pdserve")

NEEDS = {
    "gpu": (Path("/dev/nvidia0"), "needs an NVIDIA GPU (/dev/nvidia0)"),
    "rdma": (Path("/dev/infiniband"), "needs an RDMA NIC (/dev/infiniband)"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in NEEDS:
            device, reason = NEEDS[folder]
            item.add_marker(pytest.mark.skipif(not device.exists(), reason=reason))

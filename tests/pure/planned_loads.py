"""Loads to plan for."""

from pdserve.planner.load import PlannedLoad
from pdserve.workload.synthetic import parse_synthetic


def planned(keys: str, *, num_requests: int = 60) -> PlannedLoad:
    """As `prompt=500,output=20,rate=3`."""
    synthetic = parse_synthetic(keys)
    return PlannedLoad.of(
        synthetic.requests(num_requests),
        rate_per_s=synthetic.rate_per_s,
        num_prefix_tokens=synthetic.num_prefix_tokens,
    )

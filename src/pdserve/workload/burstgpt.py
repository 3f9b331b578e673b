"""The traces of BurstGPT: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`, later with more.

Source: github.com/HPMLL/BurstGPT. `Timestamp` is in seconds; a request that failed has 0 response tokens.
"""

from collections.abc import Iterable

from pdserve.workload.csv_rows import csv_rows
from pdserve.workload.request import WorkloadRequest

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")


def read_burstgpt(lines: Iterable[str]) -> tuple[list[WorkloadRequest], int]:
    """The requests that were answered, and how many were not.

    Raises: `ConfigError` with the number of the first malformed line.
    """
    requests: list[WorkloadRequest] = []
    num_failed = 0
    for row in csv_rows(lines, trace="burstgpt", columns=COLUMNS):
        arrival_s = row.real("Timestamp")
        num_prompt_tokens = row.whole("Request tokens", least=0)
        num_output_tokens = row.whole("Response tokens", least=0)
        if row.whole("Total tokens", least=0) != num_prompt_tokens + num_output_tokens:
            raise row.complaint("Total tokens is not the sum of Request tokens and Response tokens")
        if num_prompt_tokens == 0 or num_output_tokens == 0:
            num_failed += 1
            continue
        requests.append(
            WorkloadRequest(
                arrival_s=arrival_s, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens
            )
        )
    return requests, num_failed

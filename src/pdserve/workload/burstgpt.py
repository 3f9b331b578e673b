"""The traces of BurstGPT: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`, later with more.

Source: github.com/HPMLL/BurstGPT. `Timestamp` is in seconds; a request that failed has 0 response tokens.
"""

from collections.abc import Iterable

from pdserve.workload.csv_rows import csv_rows
from pdserve.workload.request import WorkloadRequest

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_burstgpt(lines: Iterable[str], *, max_requests: int | None) -> tuple[list[WorkloadRequest], int]:
    """The first requests that were answered, and how many before them were not.

    Raises: `ConfigError` with the number of the first malformed line of those read.
    """
    requests: list[WorkloadRequest] = []
    num_failed = 0
    for row in csv_rows(lines, trace="burstgpt", columns=COLUMNS):
        num_prompt_tokens = row.whole("Request tokens", least=0)
        num_output_tokens = row.whole("Response tokens", least=0)
        if num_prompt_tokens == 0 or num_output_tokens == 0:
            num_failed += 1
            continue
        requests.append(
            WorkloadRequest(
                arrival_s=row.real("Timestamp"),
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=num_output_tokens,
            )
        )
        if len(requests) == max_requests:
            break
    return requests, num_failed

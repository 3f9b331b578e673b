"""The LLM inference traces of Azure: `TIMESTAMP,ContextTokens,GeneratedTokens`.

Source: github.com/Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and its sequel of 2024, whose timestamps
have an offset from UTC.
"""

import itertools
from collections.abc import Iterable
from datetime import UTC, datetime

from pdserve.workload.csv_rows import CsvRow, csv_rows
from pdserve.workload.request import WorkloadRequest

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(lines: Iterable[str], *, max_requests: int | None) -> list[WorkloadRequest]:
    """The first requests; arrivals are seconds of the Unix epoch.

    Raises: `ConfigError` with the number of the first malformed line of those read.
    """
    return [
        WorkloadRequest(
            arrival_s=_instant_s(row),
            num_prompt_tokens=row.whole("ContextTokens", least=1),
            num_output_tokens=row.whole("GeneratedTokens", least=1),
        )
        for row in itertools.islice(csv_rows(lines, trace="azure", columns=COLUMNS), max_requests)
    ]


def _instant_s(row: CsvRow) -> float:
    """The 2023 traces write seven digits of a second; the seventh is always dropped."""
    text = row.cells["TIMESTAMP"]
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise row.complaint(f"TIMESTAMP is {text!r}, which is no date and time") from None
    return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()

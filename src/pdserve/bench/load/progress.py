"""How far a load has come, on standard error: a bar on a terminal, else a line every 10 s."""

import asyncio
import time
from collections.abc import Sequence
from typing import TextIO

from pdserve.bench.load.sender import Counts, Sender
from pdserve.units import ns_to_seconds
from pdserve.workload.request import WorkloadRequest

BAR_WIDTH = 24
BAR_EVERY_S = 0.25
LINE_EVERY_S = 10.0


async def show_progress(sender: Sender, requests: Sequence[WorkloadRequest], stream: TextIO) -> None:
    """Until cancelled."""
    is_terminal = stream.isatty()
    try:
        while True:
            await asyncio.sleep(BAR_EVERY_S if is_terminal else LINE_EVERY_S)
            elapsed_s = ns_to_seconds(time.monotonic_ns() - sender.start_ns)
            line = progress_line(
                sender.counts,
                num_requests=len(requests),
                elapsed_s=elapsed_s,
                last_due_s=requests[-1].arrival_s,
                mean_answer_s=_mean_answer_s(sender),
            )
            stream.write(f"\r\x1b[K{line}" if is_terminal else f"{line}\n")
            stream.flush()
    finally:
        if is_terminal:
            stream.write("\r\x1b[K")
            stream.flush()


def progress_line(
    counts: Counts, *, num_requests: int, elapsed_s: float, last_due_s: float, mean_answer_s: float | None
) -> str:
    """A bar of the requests that have ended, and when all will have if the server goes on as it does."""
    num_ended = counts.num_sent - counts.num_in_flight
    filled = BAR_WIDTH * num_ended // num_requests
    bar = "#" * filled + "-" * (BAR_WIDTH - filled)
    failed = f", {counts.num_failed} failed" if counts.num_failed else ""
    remaining_s = max(0.0, last_due_s - elapsed_s)
    if mean_answer_s is not None and num_ended < num_requests:
        remaining_s += mean_answer_s
    return (
        f"[{bar}] {num_ended}/{num_requests} ended, {counts.num_in_flight} in flight{failed}, "
        f"ETA {_clock(remaining_s) if mean_answer_s is not None or remaining_s else '?'}"
    )


def _mean_answer_s(sender: Sender) -> float | None:
    """Of the answers so far; None before the first."""
    ended = [
        sending.ended_ns - sending.answer.sent_ns
        for sending in sender.sendings
        if sending.ended_ns is not None and sending.error is None
    ]
    return ns_to_seconds(sum(ended) // len(ended)) if ended else None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"

"""How far the simulation of a fleet has come, on standard error, and Ctrl-C, which ends it with what there is."""

import signal
import time
from types import FrameType, TracebackType
from typing import Self, TextIO

TERMINAL_EVERY_S = 0.25
LINE_EVERY_S = 10.0


class FleetProgress:
    """Threads: the main one, whose SIGINT it takes from `__enter__` to `__exit__`; a second one interrupts as ever."""

    def __init__(self, num_requests: int, stream: TextIO) -> None:
        self._num_requests = num_requests
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._started_s = self._shown_s = time.monotonic()
        self._handler_before = signal.getsignal(signal.SIGINT)
        self.was_interrupted = False

    def __enter__(self) -> Self:
        signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._handler_before)
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def goes_on(self, num_ended: int) -> bool:
        """A `Watch` of the simulation."""
        now_s = time.monotonic()
        if now_s - self._shown_s >= (TERMINAL_EVERY_S if self._is_terminal else LINE_EVERY_S):
            self._shown_s = now_s
            line = progress_line(num_ended, self._num_requests, elapsed_s=now_s - self._started_s)
            self._stream.write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
            self._stream.flush()
        return not self.was_interrupted

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.was_interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def progress_line(num_ended: int, num_requests: int, *, elapsed_s: float) -> str:
    """With the time that is left if the rest takes as long as what is done."""
    line = f"pdserve: {num_ended} of {num_requests} requests have ended, ETA "
    if num_ended == 0:
        return f"{line}?"
    minutes, seconds = divmod(round(elapsed_s * (num_requests - num_ended) / num_ended), 60)
    return f"{line}{minutes}:{seconds:02d}"

"""Lines for whoever waits, on standard error, so that what a command found stays alone on standard output."""

import sys


def say(line: str) -> None:
    print(f"pdserve: {line}", file=sys.stderr, flush=True)

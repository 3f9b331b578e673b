"""Log handlers; the only file that installs any."""

import logging
import sys


def configure_logs(*, name: str, level: str) -> None:
    """Lines on stderr: time, level, who, event."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s %(levelname)s {name} %(message)s",
        force=True,
    )


LEVELS = ("debug", "info", "warning", "error")

"""Log handlers; the only file that installs any."""

import logging
import sys

_log = logging.getLogger(__name__)


def configure_logs(*, name: str, level: str) -> None:
    """Lines on stderr: time, level, who, event."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s %(levelname)s {name} %(message)s",
        force=True,
    )


def warn_if_open(host: str, secret: str | None) -> None:
    """Say it loudly when others can reach a control connection, and nobody asks them for a secret."""
    if secret is None and not _is_loopback(host):
        _log.warning("listening_without_secret host=%s advice=%r", host, "set PDSERVE_CLUSTER_SECRET everywhere")


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


LEVELS = ("debug", "info", "warning", "error")

"""Every environment variable that pdserve reads, and no other file reads any."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`PDSERVE_CACHE`: where prepared models lie; unset or empty: `~/.cache/pdserve`."""
    return Path(os.environ.get("PDSERVE_CACHE") or "~/.cache/pdserve").expanduser()


def api_key() -> str | None:
    """`PDSERVE_API_KEY`: what clients must send as a bearer token; unset or empty: no key is asked for."""
    return os.environ.get("PDSERVE_API_KEY") or None


def cluster_secret() -> str | None:
    """`PDSERVE_CLUSTER_SECRET`: what workers and gateway must know, and prove; unset or empty: none is asked for."""
    return os.environ.get("PDSERVE_CLUSTER_SECRET") or None


def keep_crash_handlers_ours() -> None:
    """Set `IPATH_NO_BACKTRACE`, unless it is set: libfabric's psm providers, where a build has them, would take over
    SIGSEGV and leave `*.btr` files in the working directory. Call before libfabric is loaded."""
    os.environ.setdefault("IPATH_NO_BACKTRACE", "1")


def keep_endpoints_small() -> None:
    """Set `FI_OFI_RXM_USE_SRX` and `FI_OFI_RXM_BUFFER_SIZE`, unless they are set: libfabric's rxm, under `tcp` and
    `verbs`, would fill 70 MB with receive buffers for each pair of NICs, in 35 ms, for messages that we never send.
    So it is 2 MB and 1.5 ms (libfabric 1.17, 2-core Xeon VM, 2026-11-29). Call before libfabric is loaded."""
    os.environ.setdefault("FI_OFI_RXM_USE_SRX", "0")
    os.environ.setdefault("FI_OFI_RXM_BUFFER_SIZE", "1024")


def child_environment(**changes: str) -> dict[str, str]:
    """Our environment with `changes`, for a process that we start."""
    return {**os.environ, **changes}

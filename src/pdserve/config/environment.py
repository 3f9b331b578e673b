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
    """Keep libfabric's rxm, under `tcp` and `verbs`, from taking 80 MB for each endpoint: each pair of NICs is one.

    Sets what is not set. `FI_OFI_RXM_USE_SRX` and `FI_OFI_RXM_BUFFER_SIZE`: 70 MB of receive buffers, filled in 35 ms,
    for messages that we never send; so it is 2 MB and 1.5 ms. `FI_UNIVERSE_SIZE`: a ring of completions for 256 peers,
    12.6 MB, which becomes resident as completions go round it, 48 bytes each, and looks like a leak for the first
    262,144 writes; so it is 1.6 MB, for 512 full windows of writes (libfabric 1.17, 2-core Xeon VM, 2026-11-29 and 30).
    Call before libfabric is loaded.
    """
    os.environ.setdefault("FI_OFI_RXM_USE_SRX", "0")
    os.environ.setdefault("FI_OFI_RXM_BUFFER_SIZE", "1024")
    os.environ.setdefault("FI_UNIVERSE_SIZE", "32")


def child_environment(**changes: str) -> dict[str, str]:
    """Our environment with `changes`, for a process that we start."""
    return {**os.environ, **changes}

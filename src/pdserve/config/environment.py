"""Every environment variable that pdserve reads, and no other file reads any."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """`PDSERVE_CACHE`: where prepared models lie; default `~/.cache/pdserve`."""
    return Path(os.environ.get("PDSERVE_CACHE", "~/.cache/pdserve")).expanduser()


def api_key() -> str | None:
    """`PDSERVE_API_KEY`: what clients must send as a bearer token; unset or empty: no key is asked for."""
    return os.environ.get("PDSERVE_API_KEY") or None


def cluster_secret() -> str | None:
    """`PDSERVE_CLUSTER_SECRET`: what workers and gateway must show each other; unset or empty: none is asked for."""
    return os.environ.get("PDSERVE_CLUSTER_SECRET") or None


def child_environment(**changes: str) -> dict[str, str]:
    """Our environment with `changes`, for a process that we start."""
    return {**os.environ, **changes}

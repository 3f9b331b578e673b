"""Network links that can be cut: a bridge on this machine, and behind it a network namespace for each worker.

Needs root and `ip` (iproute2). The addresses are of 198.18.0.0/15, which is for benchmarks (RFC 2544).
"""

import os
import shutil
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress

from pdserve.bench.faults.fleet import GATEWAY, Site

COMMAND_TIMEOUT_S = 20.0


class NoLinks(Exception):
    """Says why this machine can't have them, or what became of them."""


class Links:
    """Of workers by name; the gateway is on the bridge itself. Use `opened_links`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._bridge = f"pds{os.getpid()}"
        self._network = f"198.18.{os.getpid() % 256}"
        self._indices = {name: index for index, name in enumerate(names, start=2)}

    @property
    def sites(self) -> dict[str, Site]:
        """Where the members of a fleet are to run."""
        workers = {
            name: Site(host=f"{self._network}.{index}", wrapper=("ip", "netns", "exec", self._namespace(name)))
            for name, index in self._indices.items()
        }
        return {GATEWAY: Site(host=f"{self._network}.1"), **workers}

    def open(self) -> None:
        """Raises: `NoLinks` when this machine does not allow it; `close` is needed all the same."""
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self._network}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for name, index in self._indices.items():
            namespace, near = self._namespace(name), self._near_end(name)
            _ip("netns", "add", namespace)
            _ip("link", "add", near, "type", "veth", "peer", "name", "far", "netns", namespace)
            _ip("link", "set", near, "master", self._bridge, "up")
            _ip("-n", namespace, "address", "add", f"{self._network}.{index}/24", "dev", "far")
            _ip("-n", namespace, "link", "set", "far", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")

    def close(self) -> None:
        """What there is of it; a namespace takes its end of the link along."""
        for name in self._indices:
            with suppress(NoLinks):
                _ip("netns", "delete", self._namespace(name))
        with suppress(NoLinks):
            _ip("link", "delete", self._bridge)

    def cut(self, name: str) -> None:
        """Nothing gets through to or from the worker; nobody is told."""
        _ip("link", "set", self._near_end(name), "down")

    def mend(self, name: str) -> None:
        _ip("link", "set", self._near_end(name), "up")

    def mend_all(self) -> None:
        for name in self._indices:
            self.mend(name)

    def _namespace(self, name: str) -> str:
        return f"pdserve-{os.getpid()}-{name}"

    def _near_end(self, name: str) -> str:
        return f"{self._bridge}v{self._indices[name]}"


@contextmanager
def opened_links(names: Sequence[str]) -> Generator[Links]:
    """Raises: `NoLinks` with the reason why there can't be any here."""
    if os.geteuid() != 0:
        raise NoLinks("network namespaces need root")
    if shutil.which("ip") is None:
        raise NoLinks("network namespaces need `ip` (iproute2)")
    links = Links(names)
    try:
        links.open()
        yield links
    finally:
        links.close()


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        raise NoLinks(f"`ip {' '.join(arguments)}` failed: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise NoLinks(f"`ip {' '.join(arguments)}` took over {COMMAND_TIMEOUT_S:g} s") from error

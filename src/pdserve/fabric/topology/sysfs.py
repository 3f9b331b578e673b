"""Reading sysfs files that may be missing, unreadable or nonsense: every read gives a value or None, never an error."""

import re
from pathlib import Path

from pdserve.fabric.topology.cpu_list import parse_cpu_list

MAX_FILE_BYTES = 4096
"""A page, which is what the kernel limits an attribute to."""

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NUMBER = re.compile(r"\d+(\.\d+)?")


class Sysfs:
    """One sysfs tree, the machine's own or a copy. Paths are relative to its root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self, folder: str) -> tuple[str, ...]:
        """The entries of a folder, digits compared as numbers; none where there is no such folder."""
        try:
            names = [entry.name for entry in (self.root / folder).iterdir() if entry.name.isprintable()]
        except OSError:
            return ()
        return tuple(sorted(names, key=_natural_order))

    def exists(self, path: str) -> bool:
        try:
            return (self.root / path).exists()
        except OSError:
            return False

    def text(self, path: str) -> str | None:
        """A file's printable characters and line ends, so that no file steers the operator's terminal."""
        try:
            with (self.root / path).open("rb") as file:
                text = file.read(MAX_FILE_BYTES).decode(errors="replace").strip()
        except OSError:
            return None
        return "".join(character for character in text if character.isprintable() or character == "\n")

    def integer(self, path: str) -> int | None:
        """A number that is not negative: sysfs says -1 for what it does not know."""
        text = self.text(path)
        return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text) else None

    def leading_number(self, path: str) -> float | None:
        """The number that a text such as `32.0 GT/s PCIe` begins with."""
        found = _NUMBER.match(self.text(path) or "")
        return float(found[0]) if found and len(found[0]) <= 18 else None

    def cpu_list(self, path: str) -> tuple[int, ...] | None:
        text = self.text(path)
        try:
            return None if text is None else parse_cpu_list(text)
        except ValueError:
            return None

    def properties(self, path: str) -> dict[str, str]:
        """The `KEY=value` lines of a `uevent` file."""
        lines = (self.text(path) or "").splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def pci_path(self, entry: str) -> tuple[str, ...] | None:
        """Host bridge, bridges and PCI function that an entry of a class or bus is a link to; None for virtual ones."""
        try:
            folders = (self.root / entry).resolve().relative_to(self.root.resolve()).parts
        except (OSError, ValueError, RuntimeError):
            return None
        path = tuple(folder for folder in folders if _HOST_BRIDGE.fullmatch(folder) or _PCI_ADDRESS.fullmatch(folder))
        is_whole = len(path) > 1 and _HOST_BRIDGE.fullmatch(path[0]) and _PCI_ADDRESS.fullmatch(path[-1])
        return path if is_whole else None


def _natural_order(name: str) -> list[tuple[int, str]]:
    """`mlx5_2` before `mlx5_10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]

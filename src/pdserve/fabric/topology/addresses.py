"""The IP addresses of network interfaces, which sysfs does not know."""

import fcntl
import socket
import struct
from collections.abc import Callable

AddressOf = Callable[[str], str | None]
"""From an interface's name to its address, or None when it has none."""

SIOCGIFADDR = 0x8915
INTERFACE_NAME_BYTES = 16


def live_address(interface: str) -> str | None:
    """The IPv4 address of an interface of this machine. Source: netdevice(7)."""
    name = interface.encode()
    if len(name) >= INTERFACE_NAME_BYTES:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", name))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])

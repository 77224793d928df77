"""Listens at an address, and notices hosts that are gone.

`::` stands for all addresses of the machine, of both IP families.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

EVERY_ADDRESS = "::"
_EVERY_IPV4_ADDRESS = "0.0.0.0"  # noqa: S104 - what `::` means where there is no IPv6

ProtocolFactory: TypeAlias = Callable[[], asyncio.BaseProtocol]


class SocketFile:
    """The file of a unix socket, which its listener removes when it stops.

    A successor may listen at the same path by then: its file stays.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._inode = self._path.stat().st_ino

    def remove(self) -> None:
        """Remove the file, unless another has taken its place. A file that cannot be removed stays:
        it must not keep a stop from going on. To be called while the socket is open, as no other
        file can get its inode until then.
        """
        with suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


def available(host: str) -> str:
    """Return where to listen for this host: 0.0.0.0 for `::` where the kernel has no IPv6."""
    is_lacking = host == EVERY_ADDRESS and not socket.has_dualstack_ipv6()
    return _EVERY_IPV4_ADDRESS if is_lacking else host


async def listen(make: ProtocolFactory, host: str, port: int, backlog: int) -> asyncio.Server:
    """Listen at all addresses of a name. OSError when one of them is not available."""
    loop = asyncio.get_running_loop()
    if host != EVERY_ADDRESS:
        return await loop.create_server(make, host, port, backlog=backlog)
    return await loop.create_server(make, sock=both_families(port), backlog=backlog)


def both_families(port: int) -> socket.socket:
    """Return a socket at `::` that takes IPv4, too: event loops make theirs for IPv6 alone."""
    return socket.create_server(
        (EVERY_ADDRESS, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1
    )


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Notice within a minute that the host of the other end is gone, also while nothing is sent."""
    own = transport.get_extra_info("socket")
    if own is None:  # the connection was closed as it was made
        return
    own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

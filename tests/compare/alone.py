"""Runs a command in a network of its own, with one way in: `python alone.py PORT COMMAND...`.

Triton's SageMaker endpoint listens on all addresses and cannot be told otherwise. Here its network
has nothing but a loopback, and what connects to 127.0.0.1 at the port printed first is passed on
to PORT in there. All ends when the command ends, or when stdin is closed.
"""

import asyncio
import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
from contextlib import closing, suppress

CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP = 0x40000000, 0x8914, 1


def leave_the_network() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no network namespace of our own")
    with closing(socket.socket()) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with closing(writer), suppress(ConnectionError):
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()


async def main(port: int, command: list[str]) -> None:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(ConnectionError):
            from_inside, to_inside = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pass_on(reader, to_inside), pass_on(from_inside, writer))

    outside = socket.create_server(("127.0.0.1", 0))  # a socket stays in the network it was made in
    leave_the_network()
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=2
    )
    await asyncio.start_server(relay, sock=outside)
    sys.stdout.write(f"{outside.getsockname()[1]}\n")
    sys.stdout.flush()
    asyncio.get_running_loop().add_reader(0, os.killpg, 0, signal.SIGKILL)
    await child.wait()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))

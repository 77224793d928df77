"""Ports for programs that want theirs named before they listen."""

import atexit
import os
import socket
from contextlib import ExitStack, closing
from itertools import count, islice

# Below those that the kernel gives to who asks for any, and to connections: nobody else takes one
# between our look and the program's bind.
_RANGE = range(20_000, 32_000)
_HELD = ExitStack()  # until this process ends
atexit.register(_HELD.close)
_CANDIDATES = count(os.getpid())


def free_ports(number: int) -> list[int]:
    """Ports that are free, and that no other process of tests is given while this one lives."""
    candidates = (_RANGE[at % len(_RANGE)] for at in islice(_CANDIDATES, len(_RANGE)))
    found = list(islice(filter(_is_ours, candidates), number))
    assert len(found) == number, f"no {number} ports are free in {_RANGE}"
    return found


def _is_ours(port: int) -> bool:
    """Whether it is now: a name in the kernel's own namespace of sockets stands for the port."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0triton-adapter-tests-{port}")
    except OSError:  # another process has it
        name.close()
        return False
    _HELD.enter_context(name)
    with closing(socket.socket()) as one:
        try:
            one.bind(("", port))
        except OSError:  # somebody listens there; no candidate any more
            return False
    return True

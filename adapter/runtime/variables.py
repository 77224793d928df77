"""Erases secrets from what /proc/PID/environ shows of this process.

The kernel shows the memory in which the process got its variables at its start, whatever became of
them since. The C library's `environ` still refers to that memory until a variable is set anew.
"""

import ctypes
import os
from collections.abc import Iterable


def erase_values(names: Iterable[str]) -> None:
    """Overwrite the values of these variables where the process got them at its start.

    They stay in `os.environ`, and in the environment of the C library as copies, which libraries
    and child processes get.
    """
    get = ctypes.CDLL(None).getenv
    get.argtypes = [ctypes.c_char_p]
    get.restype = ctypes.c_void_p
    for name in names:
        value = os.environ.get(name)
        if not value:
            continue
        address = get(name.encode())
        if address is not None:
            ctypes.memset(address, 0, len(os.fsencode(value)))
        os.environ[name] = value

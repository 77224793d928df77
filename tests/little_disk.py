"""A small disk in the place of a folder, for one adapter alone."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.running import EMBEDDED, RunningAdapter

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 1 << 14, 1 << 18


def _started(folder: str, size: str, flags: tuple[str, ...]) -> RunningAdapter:
    """To be run in a thread of its own, which keeps the mount, as do its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(_CLONE_NEWNS) != 0
        or libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) != 0
        or libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, f"size={size}".encode()) != 0
    ):
        raise OSError(ctypes.get_errno(), f"no {folder} of our own")
    return RunningAdapter(*EMBEDDED, *flags, anew=True)


@contextmanager
def adapter_with_little(folder: str, size: str, *flags: str) -> Iterator[RunningAdapter]:
    """An adapter with a Triton of its own, which see a tmpfs at `folder`."""
    with ThreadPoolExecutor(1) as pool:
        try:
            adapter = pool.submit(_started, folder, size, flags).result()
        except OSError as error:
            pytest.skip(f"a mount namespace takes a privilege: {error}")
    try:
        adapter.wait_for("adapter.started")
        yield adapter
    finally:
        assert adapter.stop() == 0, adapter.errors


def resize(adapter: RunningAdapter, folder: str, size: str) -> None:
    enter = ("nsenter", f"--target={adapter.process.pid}", "--mount")
    mount = ("mount", "-o", f"remount,size={size}", os.fspath(folder))
    subprocess.run([*enter, *mount], check=True, timeout=30)

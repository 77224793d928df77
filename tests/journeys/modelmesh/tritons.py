"""A `tritonserver` to be found on PATH or given as a setting: the one that is installed."""

import shlex
from pathlib import Path

from adapter.backend.tritonserver import prepare


def write_tritonserver(folder: Path, *more: str, held_by: Path | None = None) -> Path:
    """In a folder of its own below `folder`, with the arguments that it needs and `more`. Whoever
    starts it waits while the file `held_by` is there.
    """
    launch = prepare(None, folder / "run")
    words = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    arguments = shlex.join((*launch.arguments, *more))
    program = folder / "bin" / "tritonserver"
    program.parent.mkdir()
    held = f"while [ -e {shlex.quote(str(held_by))} ]; do sleep 0.05; done\n" if held_by else ""
    program.write_text(
        f'#!/bin/sh\n{held}{" ".join(words)} exec {launch.binary} "$@" {arguments}\n'
    )
    program.chmod(0o755)
    return program

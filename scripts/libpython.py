"""See to it that the embedded Triton finds a libpython of the running version.

Many Pythons are built without the shared library that Triton's python backend is linked to. Where
it is missing it is taken out of Debian's package and put into this environment; no root is needed.
Exits 0 whatever happens, because only the embedded Triton needs it.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from adapter.triton.server.launch import LIBPYTHON, find_libpython, libpython_folder

PACKAGE = f"libpython{sys.version_info.major}.{sys.version_info.minor}"


def fetch(folder: Path) -> Path | None:
    """The library out of Debian's package, unpacked in `folder`. None when it cannot be had."""
    try:
        run(folder, "apt-get", "download", PACKAGE)
        for package in folder.glob("*.deb"):
            run(folder, "dpkg", "-x", str(package), "root")
    except (OSError, subprocess.SubprocessError):
        return None
    found = (path for path in folder.rglob(LIBPYTHON) if path.is_file())
    return next(found, None)


def run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)


def main() -> None:
    if sys.version_info >= (3, 13) or find_libpython() is not None:
        return
    with tempfile.TemporaryDirectory() as folder:
        fetched = fetch(Path(folder))
        if fetched is None:
            print(
                f"libpython: {LIBPYTHON} is missing; the embedded Triton needs it."
                f" Debian and Ubuntu: apt-get install {PACKAGE}",
                file=sys.stderr,
            )
            return
        shutil.copyfile(fetched, libpython_folder() / LIBPYTHON)


if __name__ == "__main__":
    main()

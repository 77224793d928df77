"""`python -m adapter`, the same as the command triton-adapter."""

import io
import os
import sys

from adapter.cli.main import main as run_command


def main() -> int:
    """Run the command line of this process; return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where the descriptor is closed
            stream.reconfigure(errors="backslashreplace")  # names are of any script, terminals not
    return run_command(sys.argv[1:], os.environ)


if __name__ == "__main__":
    sys.exit(main())

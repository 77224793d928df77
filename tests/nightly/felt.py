"""Gets a path again and again, as a process of its own, so that no other thread of the test's
process is in its way: `python -m tests.nightly.felt SECONDS ADDRESS PAUSE PATH`.

Prints a line for each answer: how long it took, in seconds.
"""

import sys
import time
from contextlib import closing

from tests.running import Client


def main(seconds: str, address: str, pause: str, path: str) -> None:
    with closing(Client(address, timeout=120)) as client:
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            started_at = time.monotonic()
            assert client.get(path).status == 200
            print(time.monotonic() - started_at)  # noqa: T201
            time.sleep(float(pause))


if __name__ == "__main__":
    main(*sys.argv[1:])

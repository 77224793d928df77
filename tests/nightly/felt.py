"""Asks the adapter one thing again and again, as a process of its own, so that no other thread of
the test's process is in its way. `python -m tests.nightly.felt SECONDS ADDRESS PAUSE PATH` gets a
path, `python -m tests.nightly.felt SECONDS ADDRESS NAME URL unload` loads a model and unloads it.

Prints a line for each answer: how long it took, in seconds; of load and unload, the unload.
SECONDS count from the first question.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from tests.running import Client


@contextmanager
def timed() -> Iterator[None]:
    began = time.monotonic()
    yield
    print(time.monotonic() - began)  # noqa: T201


def getting(client: Client, pause: str, path: str) -> Callable[[], None]:
    def ask() -> None:
        with timed():
            assert client.get(path).status == 200
        time.sleep(float(pause))

    return ask


def unloading(client: Client, name: str, url: str, _: str) -> Callable[[], None]:
    def ask() -> None:
        assert client.load(name, url).status == 200
        with timed():
            assert client.delete(f"/models/{name}").status == 200

    return ask


def main(seconds: str, address: str, *what: str) -> None:
    with closing(Client(address, timeout=120)) as client:
        ask = unloading(client, *what) if what[-1] == "unload" else getting(client, *what)
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            ask()


if __name__ == "__main__":
    main(*sys.argv[1:])

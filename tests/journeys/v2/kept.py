"""Models that stay loaded from test to test: a load takes longer than most questions to a model."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.running import Client, unload_all
from tests.trees import write_python_model


class Kept:
    """For tests that only ask; each name stands for one package."""

    def __init__(self, client: Client, root: Path) -> None:
        self._client = client
        self._root = root
        self._written: dict[str, str] = {}

    def load(
        self, name: str, write: Callable[..., Path] = write_python_model, **bodies: str
    ) -> str:
        """A model that `write` has written with these bodies, loaded now or by a test before."""
        if name not in self._written:
            package = write(self._root / str(len(self._written)), **bodies)
            reply = self._client.load(name, package)
            assert reply.status == 200, reply.body
            self._written[name] = repr(bodies)
        assert self._written[name] == repr(bodies), f"{name} is another model"
        return name


@pytest.fixture(scope="module")
def kept(shared_adapter, model_root, tmp_path_factory) -> Iterator[Kept]:
    """What it loads is unloaded at the end of the module."""
    root = model_root / tmp_path_factory.mktemp("kept").name
    with shared_adapter.client() as client:
        yield Kept(client, root)
    unload_all(shared_adapter)

"""An endpoint to each server. The built-in one can crash and hang, so each test gets its own."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.compare.servers import BuiltinServer, Endpoint
from tests.processes import descendants
from tests.running import RunningAdapter

# where it takes models from, and nowhere else
BUILTIN_MODELS = Path("/opt/ml/models")


@pytest.fixture
def endpoint(request: pytest.FixtureRequest, model_root: Path) -> Iterator[Endpoint]:
    if request.param == "adapter":
        yield adapter_endpoint(request.getfixturevalue("adapter"), model_root)
    else:
        with builtin_models(), builtin_server() as server:
            endpoint = Endpoint(server.address, BUILTIN_MODELS, server.processes)
            yield endpoint
            for folder in endpoint.unpacked:
                shutil.rmtree(folder, ignore_errors=True)  # some tests never write one


def adapter_endpoint(adapter: RunningAdapter, models: Path) -> Endpoint:
    """`processes` without the keeper, which the server is started by."""
    return Endpoint(adapter.http, models, lambda: descendants(adapter.process.pid)[1:], patience=60)


@contextmanager
def builtin_models() -> Iterator[None]:
    """The folder is made if need be, and removed then."""
    made = [path for path in (BUILTIN_MODELS, *BUILTIN_MODELS.parents) if not path.exists()]
    try:
        BUILTIN_MODELS.mkdir(parents=True, exist_ok=True)
        (probe := BUILTIN_MODELS / "probe").touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        pytest.skip(f"the built-in endpoint takes models from {BUILTIN_MODELS} only: {error}")
    try:
        yield
    finally:
        for path in made:
            with suppress(OSError):  # somebody else uses it meanwhile
                path.rmdir()


@contextmanager
def builtin_server() -> Iterator[BuiltinServer]:
    server = BuiltinServer()
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()

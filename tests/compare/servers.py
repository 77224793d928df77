"""Two servers behind one interface: the adapter, and Triton's built-in SageMaker endpoint."""

import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from adapter.triton.server.launch import Launch, prepare
from tests.processes import descendants
from tests.running import Client, Reply, wait_until
from tests.trees import infer_body, write_python_model

# What a fault of the server looks like from here. Anything else is a broken set-up, and an error.
FAULTS = (AssertionError, TimeoutError, ConnectionError, http.client.HTTPException)

_PORT_INSIDE = 8080


def on_both(fault: str) -> pytest.MarkDecorator:
    """Run the test on the adapter, and see it fail on the built-in endpoint because of `fault`.

    That endpoint does not change, so `make nightly` compares: tests/journeys/sagemaker tests the
    adapter.
    """
    expected = pytest.mark.xfail(strict=True, raises=FAULTS, reason=fault)
    builtin = pytest.param("builtin", marks=expected)
    return pytest.mark.parametrize("endpoint", ["adapter", builtin], indirect=True)


def path_of(name: str) -> str:
    return f"/models/{quote(name, safe='')}"


@dataclass(frozen=True)
class Endpoint:
    """`models` is the folder that urls must lie in, `processes` the pids of server and stubs.

    `unpacked`: what tests have put into `models`. `patience`: the seconds that each answer has at
    least. Limits below are for a server that never answers; the other may be late.
    """

    address: str
    models: Path
    processes: Callable[[], list[int]]
    unpacked: list[Path] = field(default_factory=list)
    patience: float = 0

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        seconds: float = 15,
    ) -> Reply:
        """On a connection of its own."""
        client = Client(self.address, max(seconds, self.patience))
        try:
            return client.request(method, path, body, headers)
        finally:
            client.close()

    def get(self, name: str) -> Reply:
        return self.request("GET", path_of(name))

    def listed(self) -> list[str]:
        reply = self.request("GET", "/models")
        return sorted(model.get("modelName") for model in reply.json()["models"])

    def load(
        self,
        name: str,
        url: str | Path,
        headers: Mapping[str, str] | None = None,
        *,
        seconds: float = 15,
    ) -> Reply:
        body = {"model_name": name, "url": str(url)}
        return self.request("POST", "/models", body, headers, seconds=seconds)

    def invoke(
        self,
        name: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        seconds: float = 15,
    ) -> Reply:
        body = infer_body(1.5, -2.0) if body is None else body
        return self.request("POST", f"{path_of(name)}/invoke", body, headers, seconds=seconds)

    def delete(self, name: str, *, seconds: float = 15) -> Reply:
        return self.request("DELETE", path_of(name), seconds=seconds)

    def folder(self) -> Path:
        """Where the platform would unpack the next archive; it does not exist yet."""
        hashed = self.models / f"test_{uuid.uuid4().hex}"
        self.unpacked.append(hashed)
        return hashed / "model"

    def model(self, **bodies: str) -> Path:
        return write_python_model(self.folder(), **bodies)

    def put(self, name: str, url: Path, headers: Mapping[str, str] | None = None) -> None:
        """Part of a set-up: load the model, which is not what may fail."""
        try:
            reply = self.load(name, url, headers, seconds=60)
        except FAULTS as error:
            raise RuntimeError(f"{name!r} could not be loaded: {error!r}") from error
        if reply.status != 200:
            raise RuntimeError(f"{name!r} could not be loaded: {reply.status} {reply.body!r}")

    def is_serving(self) -> bool:
        return self.request("GET", "/models", seconds=5).status == 200


def wait_for_file(path: Path, seconds: float = 60) -> None:
    """Part of a set-up: a model writes it when it has got so far."""
    try:
        wait_until(path.exists, seconds, f"{path.name} is written")
    except AssertionError as error:
        raise RuntimeError(str(error)) from error


def error_of(reply: Reply) -> str:
    """The message of an error, which must be JSON, and say so."""
    assert reply.headers.get_content_type() == "application/json", reply
    return reply.json()["error"]


def builtin_command(launch: Launch, folder: Path, port: int) -> tuple[str, ...]:
    """Makes an empty repository in `folder`. The name of `folder` begins those of shared memory."""
    repository = folder / "repository"
    repository.mkdir()
    return (
        str(launch.binary),
        f"--model-repository={repository}",
        "--model-control-mode=explicit",
        "--model-namespacing=true",
        "--allow-sagemaker=true",
        f"--sagemaker-port={port}",
        *("--allow-http=false", "--allow-grpc=false", "--allow-metrics=false"),
        f"--backend-config=python,shm-region-prefix-name={folder.name}",
        *launch.arguments,
    )


class BuiltinServer:
    """tritonserver as docker/sagemaker/serve starts it for many models, in a network of its own.

    With that script /ping is in mode `ready`: it sets SAGEMAKER_TRITON_PING_MODE for the shell
    alone.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="builtin-"))
        self._log = self.folder / "log"
        launch = prepare(None, self.folder)
        alone = (sys.executable, str(Path(__file__).with_name("alone.py")), str(_PORT_INSIDE))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                (*alone, *builtin_command(launch, self.folder, _PORT_INSIDE)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **launch.environment, "SAGEMAKER_MULTI_MODEL": "true"},
                start_new_session=True,
            )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().decode().strip()
        self.address = f"127.0.0.1:{port}"

    def wait_ready(self) -> None:
        try:
            wait_until(self._is_ready, 30, "the built-in endpoint is ready")
        except AssertionError as error:
            raise RuntimeError(f"{error}\n{self._log.read_text()[-2000:]}") from error

    def processes(self) -> list[int]:
        return descendants(self._process.pid)

    def stop(self) -> None:
        """It may hang or have died; it goes with all that it has started."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(30)
        for region in Path("/dev/shm").glob(f"{self.folder.name}*"):
            region.unlink()
        shutil.rmtree(self.folder)

    def _is_ready(self) -> bool:
        client = Client(self.address, 5)
        try:
            return client.get("/ping").status == 200
        except FAULTS:
            return False
        finally:
            client.close()

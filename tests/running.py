"""Starts the real command and talks to it: what most tests stand on."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from tests.constants import as_variable
from tests.forked import Forked
from tests.trees import infer_body

EXAMPLES = Path(__file__).parent.parent / "examples" / "models"
START_SECONDS = 100

# the gRPC listener at any free port, unless the flags behind say otherwise
SERVE = ("serve", "--log-format=json", "--grpc=127.0.0.1:0", "--grpc-data=off")


@dataclass(frozen=True)
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The text of an error."""
        return self.json()["error"]

    @property
    def code(self) -> str:
        """The name of an error, such as `ModelNotFound`."""
        return self.json()["code"]

    @property
    def data(self) -> list[Any]:
        """The values of the first output of an inference."""
        return self.json()["outputs"][0]["data"]


@dataclass
class Client:
    """One kept HTTP connection, closed by `with`; bodies that are no bytes go as JSON."""

    address: str
    timeout: float = 100
    headers: Mapping[str, str] = field(default_factory=dict)  # of each request
    _connection: http.client.HTTPConnection | None = field(default=None, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        if body is not None and not isinstance(body, bytes) and not hasattr(body, "__next__"):
            body = json.dumps(body).encode()
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self.address, timeout=self.timeout)
        try:
            self._connection.request(method, path, body, {**self.headers, **(headers or {})})
            response = self._connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        except BaseException:
            self.close()
            raise

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        return self.request("POST", path, body, headers)

    def delete(self, path: str) -> Reply:
        return self.request("DELETE", path)

    def load(self, model_name: str, url: str | Path) -> Reply:
        return self.post("/models", {"model_name": model_name, "url": str(url)})

    def unload(self, model_name: str) -> Reply:
        return self.delete(f"/models/{quote(model_name, safe='')}")

    def load_model(self, model_name: str, url: str | Path) -> None:
        """Load a model, which must succeed."""
        reply = self.load(model_name, url)
        assert reply.status == 200, reply.body

    def unload_model(self, model_name: str) -> None:
        """Unload a model, which must succeed."""
        reply = self.unload(model_name)
        assert reply.status == 200, reply.body

    def invoke(self, model_name: str, *values: float) -> Reply:
        """Send values, 1.0 unless there are others, to a model of tests.trees."""
        return self.post(
            f"/models/{quote(model_name, safe='')}/invoke", infer_body(*values or (1.0,))
        )

    def call_endpoint(self, model_name: str, body: Any = None) -> Reply:
        """Send a body, 1.0 unless there is another, to a model of the store."""
        headers = {"X-Amzn-SageMaker-Target-Model": model_name}
        return self.post("/endpoints/any/invocations", body or infer_body(1.0), headers)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


# variables that a process reads before it runs any Python
_READ_AT_START = ("LD_", "PYTHONSAFEPATH")


class RunningAdapter:
    """`triton-adapter serve` as a child process. `started` holds the fields of adapter.started."""

    def __init__(
        self,
        *flags: str,
        environ: Mapping[str, str] | None = None,
        descriptors: int | None = None,
        constants: Mapping[str, float] | None = None,
        module: str = "adapter",
        own_session: bool = False,
        anew: bool = False,
        python: str = sys.executable,
    ) -> None:
        """`descriptors`: its limit of open files, as of `ulimit -n`. `constants`: their values by
        path (`tests.constants`). `module`: what is started, by
        `python` with the packages of its environment.
        `anew`: in a new interpreter, as with what is said of it above; else forked off another.
        """
        self.lines: list[dict[str, Any]] = []
        self.listeners: dict[str, str] = {}
        self.started: dict[str, Any] = {}
        self.is_stopped = False
        self._news = threading.Condition()
        given = {**os.environ, **(environ or {}), **as_variable(constants or {})}
        is_special = descriptors is not None or module != "adapter" or own_session
        is_special |= python != sys.executable
        is_read_at_start = any(name.startswith(_READ_AT_START) for name in environ or ())
        if anew or is_special or is_read_at_start:
            if constants:
                assert module == "adapter", "another module does not read the constants"
                module = "tests.constants"
            here = () if python == sys.executable else ("-P",)  # not the checkout
            command = [python, *here, "-m", module, *SERVE, *flags]
            if descriptors is not None:
                command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
            self.process: subprocess.Popen[str] | Forked = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=given,
                start_new_session=own_session,
            )
        else:
            self.process = Forked([*SERVE, *flags], given)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            line = json.loads(text)
            with self._news:
                self.lines.append(line)
                if line["event"] == "adapter.listening":
                    self.listeners[line["listener"]] = line["address"]
                if line["event"] == "adapter.started":
                    self.started = line
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(
        self, event: str, seconds: float = START_SECONDS, **fields: object
    ) -> dict[str, Any]:
        """The first log line of that event that has these fields."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            found[:] = [
                line
                for line in self.lines
                if line["event"] == event and fields.items() <= line.items()
            ]
            return bool(found) or not self._reader.is_alive()

        with self._news:
            self._news.wait_for(is_there, seconds)
        assert found, f"no {event} {fields}; last lines: {self.lines[-5:]}"
        return found[0]

    def line_of(
        self, ask: Callable[[], object], event: str, seconds: float = 10, **fields: object
    ) -> dict[str, Any]:
        """Call `ask` until the adapter logs the event with these fields, and return its line.

        The log admits 20 refusals of a kind each second, and other tests of a shared server may
        have used them up.
        """

        def found() -> bool:
            ask()
            return any(fields.items() <= line.items() for line in self.events(event))

        wait_until(found, seconds, f"{event} {fields}", pause=0.2)
        return self.wait_for(event, **fields)

    def events(self, event: str) -> list[dict[str, Any]]:
        """Those that were read so far; all of them once the process has ended."""
        if self.process.poll() is not None:
            self._reader.join(10)
        return [line for line in list(self.lines) if line["event"] == event]

    @property
    def http(self) -> str:
        return self.listeners["http"]

    @property
    def grpc(self) -> str:
        return self.listeners["grpc"]

    @property
    def admin(self) -> str:
        return self.listeners["admin"]

    # the raw Triton behind it
    @property
    def http_address(self) -> str:
        return self.started["triton_http"]

    @property
    def grpc_address(self) -> str:
        return self.started["triton_grpc"]

    @property
    def repository(self) -> Path:
        return Path(self.started["repository"])

    def client(self, timeout: float = 100) -> Client:
        return Client(self.http, timeout)

    def state(self) -> dict[str, Any]:
        with Client(self.admin) as client:
            return client.get("/debug/state").json()

    def models(self) -> dict[str, dict[str, Any]]:
        """Return what /debug/state says of each model, by its name."""
        return {model["model_id"]: model for model in self.state()["models"]}

    def stop(self, number: int = signal.SIGTERM, seconds: float = 45) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its Triton goes with it
            raise
        self.is_stopped = True
        self._reader.join(10)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.errors = self.process.stderr.read()
        self.process.stderr.close()
        return code


# For packages whose configs are complete: to complete them costs Triton a process for each load.
COMPLETE = "--triton-args=--disable-auto-complete-config"

EMBEDDED = (
    "--triton=embedded",
    "--http=127.0.0.1:0",
    "--admin=127.0.0.1:0",
    "--triton-http=127.0.0.1:0",
    "--triton-grpc=127.0.0.1:0",
    "--triton-metrics=127.0.0.1:0",
    f"--model-roots={EXAMPLES}",
)


@contextmanager
def running_adapter(*flags: str, **options: Any) -> Iterator[RunningAdapter]:
    """An adapter that is ready for work; checked to end well, unless the test has stopped it."""
    adapter = RunningAdapter(*flags, **options)
    try:
        adapter.wait_for("adapter.started")
        yield adapter
    finally:
        code = 0 if adapter.is_stopped else adapter.stop()
    assert code == 0, adapter.errors


@contextmanager
def embedded_adapter(*flags: str, **options: Any) -> Iterator[RunningAdapter]:
    """The same with a Triton of its own, whose private folder it removes."""
    with running_adapter(*EMBEDDED, *flags, **options) as adapter:
        yield adapter
    assert not adapter.repository.exists(), "the private folder is still there"


def unload_all(adapter: RunningAdapter) -> None:
    """Also what has lost its process, which GET /models does not list. All at once: each takes
    more than a second, in which Triton sleeps.
    """
    if names := [model["model_id"] for model in adapter.state()["models"]]:
        with ThreadPoolExecutor(min(len(names), 8)) as pool:
            list(pool.map(partial(_unload, adapter), names))


def _unload(adapter: RunningAdapter, model_id: str) -> None:
    with adapter.client() as client:
        wait_until(partial(_is_gone, client, model_id), 60, f"{model_id} is unloaded")


def _is_gone(client: Client, model_id: str) -> bool:
    """False while Triton comes back after a test that ended it: 503 until its models are known."""
    status = client.unload(model_id).status
    assert status in {200, 404, 503}, status
    return status != 503


def wait_until(
    condition: Callable[[], bool], seconds: float, what: str, pause: float = 0.01
) -> None:
    """Bounded poll, for what no event tells. It looks once more when the time is up: a process
    that was stopped meanwhile has not looked at all.
    """
    pausing, end = threading.Event(), time.monotonic() + seconds
    is_over = False
    while not condition():
        assert not is_over, f"not within {seconds} s: {what}"
        pausing.wait(pause)
        # longer and longer: an adapter takes 5 ms of CPU to be asked for its metrics or state
        pause = max(pause, min(0.1, 1.3 * pause))
        is_over = time.monotonic() > end

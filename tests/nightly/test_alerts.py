"""Alerts as they are, for minutes in which nothing is wrong; and each in its fault, where a minute
is a second (`hurried`), with a new adapter for each fault. By a real Prometheus.

What fired, and what was pending, is kept as properties: `--junitxml=FILE` writes them down.
"""

import json
import os
import re
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path

import pytest

from adapter.triton.server.launch import prepare
from tests.constants import FEWEST_CONNECTIONS, NEVER, TRITON_HANG
from tests.journeys.memory.models import write_eater
from tests.journeys.observability.prometheus import (
    Prometheus,
    hurried,
    prometheus_in,
    triton_metrics,
    without,
)
from tests.journeys.observability.promtool import needs_promtool
from tests.journeys.observability.test_rules import ALERTS
from tests.processes import stubs, suspend, tritonserver
from tests.running import COMPLETE, EMBEDDED, EXAMPLES, Client, RunningAdapter, wait_until
from tests.trees import CONFIG, infer_body, write_python_model

pytestmark = [pytest.mark.triton, needs_promtool]

_FIRES_WITHIN = 120  # seconds; the longest needs half a minute of rules, and loads models meanwhile


def sized(size: str) -> str:
    return CONFIG + f'parameters {{ key: "memory_bytes" value {{ string_value: "{size}" }} }}\n'


@contextmanager
def in_a_loop(act: Callable[[], object]) -> Iterator[None]:
    """`act` again and again meanwhile. It may find the adapter away, but what it asserts holds."""
    ended, failed = threading.Event(), list[AssertionError]()

    def run() -> None:
        while not ended.is_set():
            try:
                act()
            except (OSError, HTTPException):
                ended.wait(0.1)
            except AssertionError as error:
                failed.append(error)
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(120)
    if failed:
        raise failed[0]


def started(
    *flags: str,
    descriptors: int | None = None,
    constants: Mapping[str, float] | None = None,
) -> RunningAdapter:
    adapter = RunningAdapter(*EMBEDDED, *flags, descriptors=descriptors, constants=constants)
    adapter.wait_for("adapter.listening", listener="admin")
    return adapter


# -- nothing is wrong ---------------------------------------------------------------------------


@dataclass
class Quiet:
    """The life of one pod, in parts of equal length; each is played by what is asked meanwhile."""

    prometheus: Prometheus
    folder: Path
    part_seconds: float

    def wait(self) -> None:
        time.sleep(self.part_seconds)  # rules need the time, not an event
        assert self.prometheus.firing() == set()

    @contextmanager
    def pod(self, name: str, *flags: str) -> Iterator[RunningAdapter]:
        """Watched from when it listens until it has ended."""
        adapter = started("--memory-limit=1GiB", f"--model-roots={self.folder}", *flags)
        try:
            self.prometheus.watch(adapter.admin, pod=name)
            adapter.wait_for("adapter.started", self.part_seconds + 120)
            triton = triton_metrics(adapter)
            self.prometheus.watch(triton, pod=name)
            yield adapter
            assert adapter.stop() == 0
            self.prometheus.forget(triton)
            self.prometheus.forget(adapter.admin)
        finally:
            if adapter.process.poll() is None:
                adapter.stop(signal.SIGKILL)

    def one_callers_errors(self, client: Client) -> None:
        """Beside as many good inferences; and a load for which another model goes."""
        assert client.post("/models/echo/invoke", infer_body(1.0)).status == 200
        assert client.post("/models/none/invoke", infer_body(1.0)).status == 404
        assert client.post("/models/echo/invoke", {"inputs": []}).status == 400
        assert client.load("echo", EXAMPLES / "identity").status == 409
        assert client.load("broken", self.folder / "broken").status == 400
        assert client.load("huge", self.folder / "huge").status == 400
        assert client.load("large", self.folder / "large").status == 507
        assert client.delete("/models/small").status == 200
        assert client.load("small", EXAMPLES / "identity").status == 200

    def slow_caller(self, address: str) -> None:
        """A body in three parts, a second apart."""
        body = json.dumps(infer_body(*[1.0] * 100)).encode()
        head = f"POST /models/echo/invoke HTTP/1.1\r\nHost: {address}\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as caller:
            caller.sendall(head.encode())
            for part in (body[:100], body[100:200], body[200:]):
                time.sleep(1.0)
                caller.sendall(part)
            assert caller.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.timeout(3600)
def test_nothing_fires_while_nothing_is_wrong(
    seconds: float, tmp_path: Path, record_property: Callable[[str, object], None]
):
    """A start with a Triton that takes its time, no traffic, one caller's errors, slow callers, no
    pod, and a pod again. The rules are those that the chart makes where there may be no pod.
    """
    write_python_model(tmp_path / "broken", imports="import nothing_of_that_name")
    write_python_model(tmp_path / "huge", config=sized("2GiB"))
    write_python_model(tmp_path / "large", config=sized("1000MiB"))
    rules = without(ALERTS.read_text(), "TritonAdapterAbsent")
    with prometheus_in(tmp_path, rules) as prometheus:
        quiet = Quiet(prometheus, tmp_path, seconds / 6)
        late = quiet.part_seconds
        with quiet.pod("first", slow_triton(tmp_path, min(late, 90.0))) as adapter:
            quiet.wait()  # zero traffic
            assert prometheus.value("up") == 2
            with closing(adapter.client()) as client:
                for name in ("echo", "small"):
                    assert client.load(name, EXAMPLES / "identity").status == 200
                with in_a_loop(lambda: quiet.one_callers_errors(client)):
                    quiet.wait()
            with ExitStack() as callers:
                for _ in range(10):
                    callers.enter_context(in_a_loop(lambda: quiet.slow_caller(adapter.http)))
                quiet.wait()
            seen = f"[{seconds + 200:.0f}s]"
            assert prometheus.value(f"max_over_time(triton_adapter_triton_live{seen}) == 1") > 0
            for code in (200, 400, 404, 409, 507):
                series = f'triton_adapter_requests_total{{code="{code}"}}'
                assert prometheus.value(f"sum(increase({series}{seen}))") > 0.5, code
            slow = f"sum(increase(triton_adapter_caller_seconds_sum{seen}))"
            assert prometheus.value(slow) > quiet.part_seconds
        quiet.wait()  # no pod
        assert prometheus.ask("up or triton_adapter_build_info") == []
        with quiet.pod("second"):
            quiet.wait()
        fired = prometheus.ask(f'count_over_time(ALERTS{{alertstate="firing"}}{seen})')
        pending = prometheus.ask(f"max by (alertname) (count_over_time(ALERTS{seen}))")
        for each in pending:  # none for as long as it would have had to
            record_property(f"pending_seconds_{each['metric']['alertname']}", each["value"][1])
        assert fired == []


def slow_triton(folder: Path, seconds: float) -> str:
    """The flag for a tritonserver that takes so long before it begins."""
    real = prepare(None, folder / "real")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in real.environment.items()]
    lines.append(f"sleep {seconds:.0f}")
    lines.append(f'exec {shlex.join([str(real.binary), *real.arguments])} "$@"')
    script = folder / "tritonserver"
    script.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    script.chmod(0o755)
    return f"--tritonserver={script}"


# -- something is wrong -------------------------------------------------------------------------

OUT_OF_MEMORY = 'raise RuntimeError("Out of memory. Tried to allocate 2.00 GiB")'


@dataclass
class Fault:
    """A pod with a fault. `job` is the label by which its alerts are told from those of others."""

    prometheus: Prometheus
    folder: Path
    job: str
    adapter: RunningAdapter
    record: Callable[[str, object], None]

    def await_alerts(self, *names: str) -> None:
        """All at once; others may fire as well, and are recorded."""
        seen = set[str]()

        def all_fire() -> bool:
            now = self.prometheus.firing(job=self.job)
            seen.update(now)
            return set(names) <= now

        try:
            wait_until(all_fire, _FIRES_WITHIN, f"{', '.join(names)} all fire")
        finally:
            self.record("fired", " ".join(sorted(seen)))

    def client(self) -> Client:
        return self.adapter.client()

    def load(self, name: str, package: Path) -> int:
        with closing(self.client()) as client:
            return client.load(name, package).status

    def invoke(self, name: str) -> int:
        with closing(self.client()) as client:
            return client.post(f"/models/{name}/invoke", infer_body(1.0)).status

    def load_and_unload(self, name: str, package: Path) -> None:
        with closing(self.client()) as client:
            client.load(name, package)
            client.delete(f"/models/{name}")

    def model(self, name: str, **bodies: str) -> Path:
        return write_python_model(self.folder / name, **bodies)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus_in(folder, hurried(ALERTS.read_text())) as running:
        yield running


@pytest.fixture
def pod(
    prometheus: Prometheus,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> Iterator[Callable[..., Fault]]:
    """Makes the pod, with these flags; it is watched before it has started."""
    made: list[Fault] = []

    def make(
        *flags: str,
        waits: bool = True,
        descriptors: int | None = None,
        constants: Mapping[str, float] | None = None,
    ) -> Fault:
        roots = f"--model-roots={tmp_path}"
        adapter = started(roots, COMPLETE, *flags, descriptors=descriptors, constants=constants)
        fault = Fault(prometheus, tmp_path, request.node.name, adapter, record_property)
        made.append(fault)
        prometheus.watch(adapter.admin, job=fault.job)
        if waits:
            adapter.wait_for("adapter.started")
        is_seen = f'triton_adapter_build_info{{job="{fault.job}"}}'
        wait_until(lambda: bool(prometheus.ask(is_seen)), 30, "the first scrape")
        return fault

    try:
        yield make
    finally:
        for fault in made:
            prometheus.forget(fault.adapter.admin)
            fault.adapter.stop(signal.SIGKILL)


def test_no_adapter_at_all(prometheus: Prometheus):
    wait_until(lambda: prometheus.firing() == {"TritonAdapterAbsent"}, 60, "Absent fires")


def test_a_process_that_was_killed(pod):
    fault = pod()
    fault.adapter.process.kill()
    fault.await_alerts("TritonAdapterDown")


def test_a_process_that_stands_still(pod):
    fault = pod()
    fault.adapter.process.send_signal(signal.SIGSTOP)
    fault.await_alerts("TritonAdapterDown")


def test_a_pod_that_was_drained_and_stays(pod):
    fault = pod()
    with closing(Client(fault.adapter.admin)) as admin:
        assert admin.post("/drain?timeout=5").status == 200
    fault.await_alerts("TritonAdapterNotReady", "TritonAdapterNoneReady")


def test_a_triton_that_stands_still(pod):
    fault = pod(constants={TRITON_HANG: NEVER})
    pid = tritonserver(fault.adapter)
    suspend(pid)
    try:
        fault.await_alerts("TritonAdapterTritonDown", "TritonAdapterNotReady")
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_model_that_raises(pod):
    fault = pod()
    assert fault.load("bad", fault.model("bad", answer='raise ValueError("no")')) == 200
    with in_a_loop(lambda: fault.invoke("bad")):
        fault.await_alerts("TritonAdapterServerErrors")


def test_model_that_becomes_slow(pod):
    """Half of the time is what is usual, so that it answers at once for longer than it is slow.

    20 callers of one instance wait 2 s each.
    """
    fault = pod()
    switch = fault.folder / "slow"
    answer = f"import os, time\nif os.path.exists({str(switch)!r}): time.sleep(0.1)"
    assert fault.load("m", fault.model("m", answer=answer)) == 200
    calls = f'triton_adapter_upstream_seconds_count{{job="{fault.job}"}}'
    with ExitStack() as callers:
        for _ in range(20):
            callers.enter_context(in_a_loop(lambda: fault.invoke("m")))
        usual = f"count_over_time(({calls})[60s:1s]) > 40"
        wait_until(lambda: bool(fault.prometheus.ask(usual)), 120, "40 s of fast answers")
        switch.touch()
        fault.await_alerts("TritonAdapterInferencesSlow")


def test_nothing_but_503(pod):
    fault = pod()
    slow = fault.model("slow", initialize="import time; time.sleep(1000)")
    with in_a_loop(lambda: fault.load("slow", slow)), in_a_loop(lambda: fault.invoke("slow")):
        fault.await_alerts("TritonAdapterUnavailable")
        fault.adapter.process.kill()


def test_404_and_nothing_is_loaded(pod):
    fault = pod()
    with in_a_loop(lambda: fault.invoke("none")):
        fault.await_alerts("TritonAdapterNothingLoaded")


def test_failing_model_of_load_at_start(pod, tmp_path):
    write_python_model(tmp_path / "bad", imports="import nothing_of_that_name")
    pod("--load-at-start=bad").await_alerts("TritonAdapterModelsMissing")


def test_an_adapter_that_is_short_of_cpu(pod):
    """It is stopped for most of the time, as a CPU limit would."""
    fault = pod()

    def throttle() -> None:
        fault.adapter.process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        fault.adapter.process.send_signal(signal.SIGCONT)
        time.sleep(0.05)

    with in_a_loop(throttle):
        fault.await_alerts("TritonAdapterLagging")


def test_the_first_events_of_a_new_pod(pod):
    """Between two scrapes, or nearly: nothing follows. One of each model, as the next of the same
    would not count as out of memory without cause.
    """
    fault = pod()
    names = [f"m{number}" for number in range(12)]
    for name in names:
        package = fault.model(name, answer=OUT_OF_MEMORY, config=sized("16MiB"))
        assert fault.load(name, package) == 200
    assert [fault.invoke(name) for name in names] == [507] * len(names)
    fault.await_alerts("TritonAdapterOutOfMemory")


def test_loads_that_run_out_of_memory(pod):
    fault = pod()
    bad = fault.model("bad", initialize=OUT_OF_MEMORY)
    with in_a_loop(lambda: fault.load("bad", bad)):
        fault.await_alerts("TritonAdapterLoadsFail")


def test_loads_are_refused_and_nobody_unloads(pod):
    fault = pod("--memory-limit=1GiB")
    assert fault.load("small", fault.model("small")) == 200
    assert fault.load("large", write_eater(fault.folder / "large", 300)) == 200
    second = fault.model("second", config=sized("800MiB"))
    assert fault.load("second", second) == 507
    with in_a_loop(lambda: fault.load("second", second)):
        fault.await_alerts("TritonAdapterNoRoom")
    [alert] = [
        each
        for each in fault.prometheus.alerts()
        if each["labels"]["job"] == fault.job and each["state"] == "firing"
    ]
    assert re.match(r"Most is held by large \(3..*MiB\), small \(", alert["annotations"]["holders"])


def test_models_that_come_and_go(pod):
    fault = pod()
    assert fault.load("busy", fault.model("busy", config=sized("16MiB"))) == 200
    with ExitStack() as loops:
        loops.enter_context(in_a_loop(lambda: fault.invoke("busy")))
        for name in "abcdef":
            package = fault.model(name, config=sized("16MiB"))

            loops.enter_context(in_a_loop(partial(fault.load_and_unload, name, package)))
        fault.await_alerts("TritonAdapterThrashing")


def test_a_model_that_grows_beyond_the_limit(pod):
    fault = pod("--memory-limit=700MiB")
    grows = "import numpy\nself.held = numpy.ones(800 * 2**20, numpy.uint8)"
    assert fault.load("grows", fault.model("grows", answer=grows)) == 200
    fault.invoke("grows")
    fault.await_alerts("TritonAdapterMemoryOverLimit")


def test_a_process_of_a_model_that_was_killed(pod):
    fault = pod()
    assert fault.load("m", fault.model("m")) == 200
    for pid in stubs(fault.adapter, "m"):
        os.kill(pid, signal.SIGKILL)
    fault.invoke("m")  # by which the adapter learns of it
    fault.await_alerts("TritonAdapterDeadModels")


def test_loads_near_their_time_limit(pod):
    fault = pod("--load-timeout-seconds=6")
    with ExitStack() as loops:
        for name in ("a", "b", "c", "d"):
            sleeps = "import time; time.sleep(4)"
            package = fault.model(name, initialize=sleeps, config=sized("16MiB"))

            loops.enter_context(in_a_loop(partial(fault.load_and_unload, name, package)))
        fault.await_alerts("TritonAdapterLoadsSlow")


def test_a_load_that_does_not_end(pod):
    fault = pod()
    slow = fault.model("slow", initialize="import time; time.sleep(1000)")
    with in_a_loop(lambda: fault.load("slow", slow)):
        fault.await_alerts("TritonAdapterOperationsStuck")
        fault.adapter.process.kill()


def test_callers_that_keep_connections(pod):
    fault = pod(constants={FEWEST_CONNECTIONS: 5000}, descriptors=400)
    host, _, port = fault.adapter.http.rpartition(":")
    with ExitStack() as callers:
        for _ in range(330):
            callers.enter_context(socket.create_connection((host, int(port)), timeout=30))
        fault.await_alerts("TritonAdapterFilesRunOut")


def test_disk_cache_in_which_nothing_may_leave(pod, tmp_path):
    """Two pinned models take four fifths of it, and the third needs more than is left."""
    for name in ("x", "y", "z"):
        package = write_python_model(tmp_path / "store" / name, config=sized("16MiB"))
        (package / "weights.bin").write_bytes(bytes(40 * 2**20))
    store = (f"--model-store={tmp_path}/store", f"--cache-dir={tmp_path}/cache")
    fault = pod(*store, "--cache-limit=100MiB", "--pin=x", "--pin=y")

    def call(name: str) -> int:
        headers = {"X-Amzn-SageMaker-Target-Model": name}
        with closing(fault.client()) as client:
            return client.post("/endpoints/any/invocations", infer_body(1.0), headers).status

    assert [call("x"), call("y"), call("z")] == [200, 200, 503]
    with in_a_loop(lambda: call("z")):
        fault.await_alerts("TritonAdapterDiskFull")


def test_something_ends_the_process_again_and_again(pod):
    fault = pod()
    same = f"--admin={fault.adapter.admin}"
    for _ in range(3):
        started_before = fault.prometheus.value(f'process_start_time_seconds{{job="{fault.job}"}}')
        fault.adapter.stop(signal.SIGKILL)
        fault.adapter = started(same)
        newer = f'process_start_time_seconds{{job="{fault.job}"}} > {started_before}'
        wait_until(lambda newer=newer: bool(fault.prometheus.ask(newer)), 60, "it is back")
    fault.await_alerts("TritonAdapterRestarts")

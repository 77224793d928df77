"""The life of a model, as docs/sagemaker.md compares it with the built-in endpoint."""

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.asking import Gate
from tests.compare.servers import (
    Endpoint,
    on_both,
    wait_for_file,
)
from tests.running import wait_until

pytestmark = [pytest.mark.triton, pytest.mark.builtin, pytest.mark.nightly]

TARGET = "X-Amzn-SageMaker-Target-Model"


def written_by(path: Path) -> str:
    """A statement of a model: leave its process id in that file."""
    return f"import os; open({str(path)!r}, 'w').write(str(os.getpid()))"


def dead_name(url: Path) -> str:
    """One for each test: the adapter takes longer over a name whose last process has died."""
    return url.parent.name


@on_both("the unload waits for the answer in flight, which waits for the unload's thread")
def test_an_unload_during_an_invocation_is_answered_once_that_has_ended(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    slow = f"{written_by(begun)}\nimport time; time.sleep(2)"
    endpoint.put("x", endpoint.model(answer=slow))
    with ThreadPoolExecutor() as pool:
        invoked = pool.submit(endpoint.invoke, "x")
        wait_for_file(begun)
        try:
            unloaded = endpoint.delete("x")
        finally:
            answer = invoked.exception() or invoked.result()

    assert unloaded.status == 200
    assert answer.status == 200
    assert endpoint.listed() == []


class TestTheTargetModelHeaderIsForLoggingOnly:
    """Loaded with it, a model is known to the built-in endpoint by it."""

    @pytest.fixture
    def loaded(self, endpoint: Endpoint) -> Endpoint:
        endpoint.put("hash", endpoint.model(), {TARGET: "team-a.tar.gz"})
        return endpoint

    @on_both("lists {}")
    def test_a_model_loaded_with_it_is_listed(self, loaded: Endpoint) -> None:
        assert loaded.listed() == ["hash"]

    @on_both("looks for a model of the header's name")
    def test_an_invocation_may_come_without_it_or_with_another(self, loaded: Endpoint) -> None:
        assert loaded.invoke("hash").status == 200
        assert loaded.invoke("hash", headers={TARGET: "team-b.tar.gz"}).status == 200

    @on_both("unloads nothing, and waits for it for 350 s")
    def test_an_unload_may_come_without_it(self, loaded: Endpoint) -> None:
        server, *stubs = loaded.processes()
        if not stubs:
            raise RuntimeError("no stub process")
        assert loaded.delete("hash", seconds=6).status == 200
        wait_until(lambda: not set(stubs) & set(loaded.processes()), 5, "the process is gone")
        assert server in loaded.processes()


@on_both("asks for version 1 alone")
def test_a_model_without_a_version_1_is_listed(endpoint: Endpoint) -> None:
    endpoint.put("x", endpoint.model(version="3"))

    assert endpoint.listed() == ["x"]


@on_both("/ping says 400 during loads")
def test_ping_is_well_during_a_load(endpoint: Endpoint, gate: Gate) -> None:
    url = endpoint.model(initialize=gate.statements)
    with ThreadPoolExecutor() as pool:
        loaded = pool.submit(endpoint.load, "x", url, seconds=60)
        wait_for_file(gate.reached)
        try:
            during = endpoint.request("GET", "/ping")
        finally:
            gate.open()
        if loaded.result().status != 200:
            raise RuntimeError("the load failed")

    assert during.status == 200


@on_both("/ping says 400 for good")
def test_ping_is_well_after_a_failed_load(endpoint: Endpoint) -> None:
    if (
        endpoint.load("x", endpoint.model(initialize="raise ValueError('no weights')")).status
        != 400
    ):
        raise RuntimeError("the load did not fail")

    assert endpoint.request("GET", "/ping").status == 200


@on_both("the server dies of it")
def test_a_model_whose_folder_was_removed_is_unloaded(endpoint: Endpoint) -> None:
    url = endpoint.model()
    endpoint.put("x", url)
    shutil.rmtree(url.parent)

    unloaded = endpoint.delete("x")

    assert unloaded.status == 200
    assert endpoint.is_serving()
    assert endpoint.listed() == []


class TestAModelWhosePythonProcessHasDied:
    """Once an invocation has met the dead process, the server knows."""

    @pytest.fixture
    def url(self, endpoint: Endpoint, tmp_path: Path) -> Path:
        stub = tmp_path / "stub"
        url = endpoint.model(initialize=written_by(stub))
        endpoint.put(dead_name(url), url)
        pid = int(stub.read_text())
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in endpoint.processes(), 10, "the process is gone")
        return url

    @on_both("says 400, as if the caller could mend it")
    def test_an_invocation_fails_as_the_fault_of_the_server(
        self, endpoint: Endpoint, url: Path
    ) -> None:
        assert endpoint.invoke(dead_name(url)).status >= 500

    @on_both("goes on calling it fine")
    def test_it_is_no_longer_listed_nor_found(self, endpoint: Endpoint, url: Path) -> None:
        endpoint.invoke(dead_name(url))

        assert endpoint.listed() == []
        assert endpoint.get(dead_name(url)).status == 404

    @on_both("waits for it for 350 s")
    def test_it_is_unloaded_without_a_wait_for_minutes(self, endpoint: Endpoint, url: Path) -> None:
        endpoint.invoke(dead_name(url))

        assert endpoint.delete(dead_name(url)).status == 200
        assert endpoint.get(dead_name(url)).status == 404

    @on_both("the server dies of it")
    def test_it_is_unloaded_when_its_folder_is_gone_too(
        self, endpoint: Endpoint, url: Path
    ) -> None:
        shutil.rmtree(url.parent)

        assert endpoint.delete(dead_name(url)).status == 200
        assert endpoint.get(dead_name(url)).status == 404

    @on_both("says 409, it is loaded already")
    def test_it_can_be_loaded_again(self, endpoint: Endpoint, url: Path) -> None:
        endpoint.invoke(dead_name(url))

        assert endpoint.load(dead_name(url), url).status == 200
        assert endpoint.invoke(dead_name(url)).status == 200

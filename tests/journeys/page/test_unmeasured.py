"""An external Triton on a CPU: nobody can measure its memory, and each view says so."""

from collections.abc import Iterator

import pytest

from tests.journeys.client.terminal import run
from tests.processes import beside
from tests.running import EXAMPLES, Client, RunningAdapter, embedded_adapter
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

SAID = "memory is not measured: set memory_limit; see docs/memory.md#limits"


@pytest.fixture(scope="module")
def triton() -> Iterator[RunningAdapter]:
    with embedded_adapter() as found:
        yield found


def told(adapter: RunningAdapter, *argv: str) -> str:
    environ = {"ADAPTER_HTTP": adapter.http, "ADAPTER_ADMIN": adapter.admin}
    done = run(*argv, environ=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def test_memory_without_limit_is_told_as_unmeasured(triton, browser):
    """Sizes are unknown then."""
    with beside(triton) as adapter, Client(adapter.admin) as admin:
        assert adapter.wait_for("memory.not_measured", level="warning")["reason"] == SAID
        ready = admin.get("/readyz")
        assert (ready.status, ready.json()["notes"]) == (200, [SAID])
        loaded = told(adapter, "load", "digits", str(EXAMPLES / "digits"))
        assert loaded.endswith(" s; size unknown\n")
        shown = [line.split()[:4] for line in told(adapter, "ps").splitlines()]
        assert ["digits", "READY", "unknown", "-"] in shown

        browser.open(adapter.admin)
        browser.until(lambda: "digits" in browser.rows(), "the model is there")
        assert "size unknown" in browser.rows()["digits"]
        assert browser.text("#reasons") == SAID
        told(adapter, "unload", "digits")
        browser.until(lambda: "unloaded digits" in browser.events()[0], "it is unloaded")
        assert "0 bytes" not in browser.text("main")


def test_sizes_are_estimates_by_files_with_a_limit(triton, tmp_path):
    large = write_python_model(tmp_path / "large")
    (large / "1" / "weights.bin").write_bytes(bytes(80 * 2**20))
    with (
        beside(triton, "--memory-limit=1GiB", f"--model-roots={tmp_path}") as adapter,
        Client(adapter.admin) as admin,
    ):
        assert "notes" not in admin.get("/readyz").json()
        assert told(adapter, "load", "large", str(large)).endswith(" takes 100.0 MiB (disk)\n")
        loaded = told(adapter, "load", "digits", str(EXAMPLES / "digits"))
        assert loaded.endswith(" takes 64.0 MiB (disk)\n")
        assert adapter.events("memory.not_measured") == []

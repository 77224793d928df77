"""Time limits: an answer comes, and what was given up is taken down."""

from pathlib import Path

import pytest

from tests.asking import refusal
from tests.constants import HANG
from tests.running import COMPLETE, EXAMPLES, embedded_adapter, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton


def test_slow_load_is_504_and_taken_down(model_root, package, gate):
    """A good load must end in that time, on a busy machine, too: 504, and 409 for a while."""
    write_python_model(package, initialize=gate.statements)
    flags = (f"--model-roots={model_root}", "--load-timeout-seconds=8", COMPLETE)
    with (
        embedded_adapter(*flags, constants={HANG: 8}) as adapter,
        adapter.client() as client,
    ):

        def loads(name: str, url: Path) -> bool:
            status = client.load(name, url).status
            assert status in {200, 409, 504}
            return status == 200

        assert refusal(client.load("slow", package)) == (504, "BackendTimeout", "slow")
        wait_until(lambda: loads("other", EXAMPLES / "identity"), 60, "another is loaded")
        client.unload_model("other")
        gate.open()
        adapter.wait_for("model.load_failed", model_id="slow")
        assert refusal(client.get("/models/slow"))[0] == 404
        wait_until(lambda: list(adapter.repository.iterdir()) == [], 60, "nothing of it is left")
        wait_until(lambda: loads("slow", package), 60, "it is loaded")

"""A load that ends Triton: its caller hears how Triton ended, and where to read on."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.asking import refusal
from tests.running import embedded_adapter
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

_KILL = "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)"


def test_load_names_the_signal_that_ended_triton(tmp_path: Path) -> None:
    package = write_python_model(tmp_path / "killer", initialize=_KILL)
    with (
        embedded_adapter(f"--model-roots={tmp_path}") as adapter,
        closing(adapter.client()) as client,
    ):
        reply = client.load("killer", package)
        assert refusal(reply)[:2] == (503, "BackendUnavailable")
        text = b"Triton was killed by SIGKILL while it was loading model 'killer'"
        assert text in reply.body
        assert b"docs/operations.md#after-a-restart-of-triton" in reply.body

"""The first minutes of somebody new: `make run` in a clone that has no environment yet."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.nightly.test_load import made_run
from tests.ports import free_ports
from tests.running import Client

pytestmark = [pytest.mark.triton, pytest.mark.timeout(1800)]


def test_make_run_installs_once_and_answers(copy: Path, tmp_path: Path) -> None:
    digits = copy / "examples" / "models" / "digits"
    python = Path(sys.base_prefix, "bin", "python3")
    for log in (tmp_path / "first", tmp_path / "second"):
        http, admin, grpc = (f"127.0.0.1:{port}" for port in free_ports(3))
        arguments = [f"HTTP={http}", f"ADMIN={admin}", f"GRPC={grpc}", f"PYTHON={python}"]
        with made_run(log, arguments, folder=copy), closing(Client(http)) as client:
            assert client.load("digits", digits).status == 200
            reply = client.post("/models/digits/invoke", (digits / "sample.json").read_bytes())
            assert [8, 4, 0, 0, 2, 7, 2, 2] in [out["data"] for out in reply.json()["outputs"]]

    packages = "setup: installing the packages of requirements/run.txt"
    assert packages in (tmp_path / "first").read_text()
    assert "setup:" not in (tmp_path / "second").read_text()

"""Live clients, as users have them, take the fast path of the http listener."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
import requests

from tests.journeys.v2.talks import Talk
from tests.running import Client, RunningAdapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

TIMES = 100
MODEL = "fast-clients"


def fast(adapter: RunningAdapter) -> float:
    """Requests that took the fast path so far, of all methods."""
    with closing(Client(adapter.listeners["admin"])) as client:
        text = client.request("GET", "/metrics").body.decode()
    found = re.findall(r"^triton_adapter_requests_fast_total\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


@pytest.fixture
def served(adapter: RunningAdapter, package) -> RunningAdapter:
    with closing(adapter.client()) as client:
        assert client.load(MODEL, write_python_model(package)).status == 200
    return adapter


def by_tritonclient(name: str) -> Callable[[RunningAdapter], None]:
    def ask(adapter: RunningAdapter) -> None:
        with closing(Talk(name, adapter.listeners["http"])) as talk:
            for _ in range(TIMES):
                talk.infer(MODEL, [talk.input("IN", "FP32", np.array([1], np.float32))])

    return ask


def by_requests(adapter: RunningAdapter) -> None:
    with requests.Session() as session:
        for _ in range(TIMES):
            url = f"http://{adapter.http}/models/{MODEL}/invoke"
            assert session.post(url, json=infer_body(1), timeout=60).status_code == 200


def by_curl(adapter: RunningAdapter) -> None:
    """One process; the connection is kept from one URL to the next."""
    url = f"http://{adapter.http}/models/{MODEL}/invoke"
    fields = ["-H", "Content-Type: application/json", "-d", json.dumps(infer_body(1))]
    command = [
        "curl",
        "-sS",
        "--fail",
        *fields,
        "-w",
        "%{http_code}\n",
        *(["-o", "/dev/null", url] * TIMES),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["200"] * TIMES


CLIENTS: dict[str, Callable[[RunningAdapter], None]] = {
    "tritonclient.http": by_tritonclient("http"),
    "tritonclient.http.aio": by_tritonclient("http.aio"),
    "requests": by_requests,
    "curl": by_curl,
}


@pytest.mark.parametrize("client", CLIENTS)
def test_99_of_100_inferences_of_this_client_take_the_fast_path(served, client) -> None:
    if client == "curl" and shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    before = fast(served)
    CLIENTS[client](served)
    assert fast(served) - before >= 0.99 * TIMES

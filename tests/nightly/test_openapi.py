"""The requests of tests/openapi/test_schemathesis.py, others each time; and Triton away."""

from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.constants import LOAD_WAIT, UNLOAD
from tests.journeys.v2.calls import uploading_adapter
from tests.openapi.playing import (
    AT_ADMIN,
    AT_HTTP,
    CALLS,
    CHANGING,
    CYCLE,
    only,
    opened_adapter,
    phases,
    play,
    without,
)
from tests.running import COMPLETE, EXAMPLES, embedded_adapter, unload_all, wait_until

# Where no Triton answers, and nobody waits for it long. 504 is of an unload, which goes on.
AWAY = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "4xx", "503", "504"]
"""
REFUSED = ("--exclude-checks=positive_data_acceptance,negative_data_rejection",)
HASTY = ("--model-wait-seconds=1",)


def test_any_requests_are_answered_as_described(seconds, seed, tmp_path: Path):
    def played(address: str, share: float, *flags: str) -> None:
        bound = max(5, int(share * seconds))
        more = (f"--seed={seed}", f"--max-time={bound}", "--max-examples=1000")
        play(address, tmp_path, *more, *flags, seconds=bound + 120)

    with opened_adapter(tmp_path / "cache") as adapter:
        with closing(adapter.client()) as client:
            assert client.load("identity", EXAMPLES / "identity").status == 200
        played(adapter.http, 0.6, *AT_HTTP, *without(CHANGING), phases(*CALLS))
        played(adapter.admin, 0.1, *AT_ADMIN, phases(*CALLS))
        unload_all(adapter)
        played(adapter.http, 0.1, *only(CHANGING), phases(*CALLS))
        unload_all(adapter)
        played(adapter.http, 0.2, *only(CYCLE), phases("stateful"))


def test_calls_without_triton_are_answered_as_described(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
):
    store = (f"--model-store={EXAMPLES}", f"--cache-dir={tmp_path_factory.mktemp('cache')}")
    with ExitStack() as stack:
        with embedded_adapter(COMPLETE) as triton:
            quick = {LOAD_WAIT: 1, UNLOAD: 2}
            adapter = uploading_adapter(triton, EXAMPLES, *store, *HASTY, constants=quick)
            stack.callback(adapter.stop)
            with closing(adapter.client()) as client:
                assert client.load("identity", EXAMPLES / "identity").status == 200
        with closing(adapter.client()) as client:
            wait_until(lambda: client.get("/ping").status == 503, 30, "Triton is away")
        play(adapter.http, tmp_path, *AT_HTTP, *REFUSED, phases("examples"), more=AWAY)
        play(adapter.admin, tmp_path, *AT_ADMIN, *REFUSED, phases("coverage"), more=AWAY)

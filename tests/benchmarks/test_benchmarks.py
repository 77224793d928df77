"""The program behind `make bench`: its arithmetic, its page, and what it takes for a failure."""

import shutil
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

import grpc
import pytest

from tests.benchmarks import __main__ as program
from tests.benchmarks.figures import quantile, spread
from tests.benchmarks.generators import run_h2load, run_wrk
from tests.benchmarks.place import FailedError
from tests.benchmarks.proxies import run_stand_in
from tests.benchmarks.rows import MEASURES, ROWS, Row, verdict

PROGRAMS = ("wrk", "h2load", "nginx")
needs_programs = pytest.mark.skipif(
    not all(shutil.which(name, path="/usr/bin:/usr/sbin") for name in PROGRAMS),
    reason=f"needs {', '.join(PROGRAMS)}",
)

MOST = Row("m", "f", "w", "x", most=1.6)


@pytest.mark.parametrize(
    ("row", "values", "said"),
    [
        (MOST, (1.2, 1.5, 1.6), "met"),
        (MOST, (1.2, 1.5, 1.61), "not settled"),
        (MOST, (1.5, 1.7, 1.9), "not settled"),
        (MOST, (1.61, 1.7, 1.9), "missed"),
        (MOST, (1.2, 1.3), "not settled"),
        (Row("m", "f", "w", "x"), (1.0, 1.0, 1.0), ""),
    ],
)
def test_verdict_needs_all_of_three_rounds(row, values, said):
    assert verdict(row, spread(values)) == said


def test_notes_and_paths_of_measures_exist():
    notes = tomllib.loads(program._NOTES.read_text())
    paths = {path for _, measured in MEASURES.values() for path in measured}

    assert notes.keys() <= MEASURES.keys() | {each.key for each in ROWS}
    assert [path for path in paths if not (program._ROOT / path).exists()] == []


@contextmanager
def serve_calls(failing_from: float) -> Iterator[str]:
    """Answer calls of gRPC with a message, those from this number on with INTERNAL."""
    numbers = count()

    def answer(_request: bytes, context: grpc.ServicerContext) -> bytes:
        if next(numbers) >= failing_from:
            context.abort(grpc.StatusCode.INTERNAL, "broken")
        return b"answer"

    class Handler(grpc.GenericRpcHandler):
        def service(self, _call):
            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@needs_programs
@pytest.mark.slow
@pytest.mark.parametrize("rate", [None, 100])
def test_calls_over_grpc_are_counted_and_timed(rate):
    with serve_calls(float("inf")) as address:
        load = run_h2load(address, 1, rate)
    assert load.answered == rate or (rate is None and load.answered > 10)
    assert abs(load.seconds - 1) < 0.2
    assert len(load.latencies_seconds) >= load.answered
    assert 0 < quantile(load.latencies_seconds, 0.99) < 1


@needs_programs
@pytest.mark.slow
@pytest.mark.parametrize("rate", [None, 100])
@pytest.mark.parametrize("failing_from", [0, 20])
def test_failed_calls_over_grpc_fail_the_measure(failing_from, rate):
    """Such a call has the status 200 in HTTP, so `h2load` counts it as one that succeeded."""
    with serve_calls(failing_from) as address, pytest.raises(FailedError):
        run_h2load(address, 1, rate)


@needs_programs
@pytest.mark.slow
@pytest.mark.parametrize("path", ["", "%00"])
def test_refused_requests_over_rest_fail_the_measure(path, tmp_path):
    script = tmp_path / "get.lua"
    script.write_text('wrk.method = "GET"')
    with run_stand_in() as side:
        if not path:
            assert run_wrk(script, f"http://{side.address}/", 1, 0) > 10
            return
        with pytest.raises(FailedError, match="Non-2xx"):
            run_wrk(script, f"http://{side.address}/{path}", 1, 0)

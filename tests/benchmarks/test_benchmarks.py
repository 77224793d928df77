"""The program behind `make bench`: its arithmetic, its page, and what it takes for a failure."""

import json
import shutil
import subprocess
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
from tests.benchmarks.page import page
from tests.benchmarks.place import QUICK, FailedError, NotMeasuredError
from tests.benchmarks.proxies import run_stand_in
from tests.benchmarks.rows import MEASURES, ROWS, Row, verdict

PROGRAMS = ("wrk", "h2load", "nginx")
needs_programs = pytest.mark.skipif(
    not all(shutil.which(name, path="/usr/bin:/usr/sbin") for name in PROGRAMS),
    reason=f"needs {', '.join(PROGRAMS)}",
)

MOST = Row("m", "f", "w", "x", most=1.6)


def row(key: str) -> Row:
    return next(each for each in ROWS if each.key == key)


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


def measure(figures: dict, *, is_stale: bool = False, quick: bool = False) -> dict:
    about = {"cpu": "a CPU", "cores": 2, "memory_bytes": 2**31, "kernel": "6", "versions": ["x 1"]}
    said = {"commit": "1234567890ab", "date": "2026-01-01", "machine": about, "busy": 0.25}
    return said | {"quick": quick, "is_stale": is_stale, "figures": figures}


def line_of(text: str, key: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {row(key).what} |"))


def test_page_shows_verdicts_commit_and_date():
    """The note of a row is shown while it is missed."""
    notes = {"grpc.cpu": "the parser takes 20 µs"}
    met = page({"grpc": measure({"cpu": spread([1.5] * 3)})}, notes)
    missed = page({"grpc": measure({"cpu": spread([2.7] * 3)})}, notes)

    assert line_of(met, "grpc.cpu").endswith("| at most 2.2 x | 1.5 x (1.5 to 1.5): met |")
    assert line_of(missed, "grpc.cpu").endswith(": missed |")
    assert "Commit 1234567890ab, 2026-01-01, 2 cores." in met
    assert "not measured on this code: 2.\n" in met
    assert [notes["grpc.cpu"] in text for text in (met, missed)] == [False, True]


@pytest.mark.parametrize(("how", "said"), [("is_stale", ") |"), ("quick", "): coarse |")])
def test_old_and_coarse_figures_have_no_verdict(how, said):
    figures = {"cpu": spread([9.0] * 3), "adapter_rate": spread([9] * 3)}

    text = page({"grpc": measure(figures, **{how: True})}, {"grpc.cpu": "a reason"})

    assert all(line_of(text, f"grpc.{each}").endswith(said) for each in figures)
    assert ": met" not in text
    assert ": missed" not in text
    assert "a reason" not in text
    assert ("1234567890ab (older code)" in text) == (how == "is_stale")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Two files, one commit; `git` runs in it."""

    def git(*arguments: str) -> str:
        own = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", *own, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    for name in ("code", "docs"):
        (tmp_path / name).write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    monkeypatch.setattr(program, "_ROOT", tmp_path)
    return tmp_path, git


def test_figures_become_stale_when_measured_paths_change(repository):
    folder, git = repository
    commit = program.find_commit(["code"])
    (folder / "docs").write_text("2")
    git("commit", "-qam", "docs")
    assert git("rev-parse", "HEAD").startswith(commit) is False
    assert not program.is_stale(commit, ["code"])

    (folder / "code").write_text("2")
    assert program.is_stale(commit, ["code"])
    git("commit", "-qam", "code")
    assert program.is_stale(commit, ["code"])
    assert program.is_stale("no-such-commit", ["docs"])
    (folder / "code").write_text("3")
    assert program.find_commit(["code"]).endswith("+")
    assert not program.find_commit(["docs"]).endswith("+")


@pytest.mark.slow
def test_failed_measure_keeps_others_and_their_figures(monkeypatch, tmp_path):
    def absent(_scale):
        raise NotMeasuredError("not here")

    def broken(_scale):
        raise FailedError("a call went wrong")

    by = {
        "rest": absent,
        "grpc": broken,
        "cold": lambda scale: {"gz_128_call": spread([scale.rounds])},
    }
    monkeypatch.setattr(program, "BY", by)
    measures = {"churn": {"date": "then"}, "rest": {"date": "before"}}

    failed = program.measure(list(by), QUICK, measures, tmp_path / "out" / "benchmarks.json")

    assert failed == ["grpc"]
    assert measures["churn"] == {"date": "then"}
    assert measures["rest"] == {"date": "before"}
    assert measures["cold"]["figures"] == {"gz_128_call": spread([QUICK.rounds])}
    assert measures["cold"]["quick"]
    assert json.loads((tmp_path / "out" / "benchmarks.json").read_text()) == measures


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

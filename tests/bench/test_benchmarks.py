"""The program behind `make bench`: its arithmetic, its page, and the stand-in for Triton."""

import json
import subprocess
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest

from adapter.tools.bench.plan import read_head
from tests.benchmarks import __main__ as program
from tests.benchmarks.control import external
from tests.benchmarks.exchange import Exchange
from tests.benchmarks.figures import added, difference, over, p50, quantile, ratios, spread
from tests.benchmarks.inference import head_of, metadata_of
from tests.benchmarks.page import page, shown
from tests.benchmarks.place import QUICK, FailedError, NotMeasuredError, Side, in_turns, load
from tests.benchmarks.record import heads_in
from tests.benchmarks.rows import CLIENTS, MEASURES, ROWS, Row, number, verdict
from tests.benchmarks.stand_in import running
from tests.running import EXAMPLES

MOST, LEAST = Row("m", "f", "w", "x", most=1.6), Row("m", "f", "w", "x", least=0.85)
LAST = "many.unload"


def row(key: str) -> Row:
    return next(each for each in ROWS if each.key == key)


def test_a_spread_is_the_median_round_with_the_least_and_the_greatest():
    assert spread([3, 1, None, 2]) == {"median": 2, "min": 1, "max": 3, "rounds": 3}
    assert spread([3, 1], 10)["max"] == 30
    assert spread([None]) is None


@pytest.mark.parametrize(("share", "value"), [(0.5, 51), (0.99, 100), (0.0, 1), (1.0, 100)])
def test_a_quantile_is_one_of_the_values(share, value):
    assert quantile(range(100, 0, -1), share) == value
    assert p50([5]) == 5


def test_ratios_are_taken_round_by_round():
    assert ratios([10, 40], [5, 10]) == {"median": 3, "min": 2, "max": 4, "rounds": 2}
    rounds = {"adapter": [{"cpu": 3}, {"cpu": 8}], "copying": [{"cpu": 2}, {"cpu": 2}]}
    assert over(rounds, "cpu", "adapter", "copying") == spread([1.5, 4])


def test_what_is_added_is_compared_with_what_copying_adds_and_a_round_without_that_is_left_out():
    p50s = {"adapter": (5, 4, 4), "copying": (3, 2, 4), "triton": (2, 2, 2)}
    rounds = {name: [{"p50": each} for each in values] for name, values in p50s.items()}

    assert added(rounds, "adapter", "copying", "triton") == spread([3, 1])


def test_a_difference_is_taken_round_by_round_in_the_unit_that_is_asked_for():
    rounds = {"one": [{"cpu": 5}, {"cpu": 50}], "other": [{"cpu": 4}, {"cpu": 52}]}
    assert difference(rounds, "cpu", "one", "other", 10) == spread([10, -20])


def test_a_difference_may_be_the_median_of_several_pairs():
    rounds = {"one": [{"cpu": each} for each in (1, 9, 2, 7, 5)], "other": [{"cpu": 0}] * 5}
    assert difference(rounds, "cpu", "one", "other", pairs=3) == spread([2, 6])


@pytest.mark.parametrize(
    ("row", "values", "said"),
    [
        (MOST, (1.2, 1.5, 1.6), "met"),
        (MOST, (1.2, 1.5, 1.61), "not settled"),
        (MOST, (1.5, 1.7, 1.9), "not settled"),
        (MOST, (1.61, 1.7, 1.9), "missed"),
        (LEAST, (0.85, 0.9, 0.95), "met"),
        (LEAST, (0.84, 0.9, 0.95), "not settled"),
        (LEAST, (0.5, 0.7, 0.84), "missed"),
        (MOST, (1.2, 1.3), "not settled"),
        (MOST, (5.0,), "not settled"),
        (Row("m", "f", "w", "x"), (1.0, 1.0, 1.0), ""),
    ],
)
def test_the_worst_of_three_rounds_has_to_meet_a_target_and_the_best_to_miss_it(row, values, said):
    assert verdict(row, spread(values)) == said


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0018, "0.0018"), (0.02, "0.02"), (0.85, "0.85"), (3.0, "3"), (12.34, "12.3"),
     (40.0, "40"), (0.7, "0.7"), (1234.5, "1,234"), (-31.26, "-31.3"), (0.0, "0")],
)  # fmt: skip
def test_a_number_is_shown_with_the_digits_that_say_something(value, text):
    assert number(value, "") == text
    assert number(value, "ms") == f"{text} ms"


def test_a_figure_is_shown_with_its_spread_or_says_that_there_is_none():
    assert shown(spread([1, 2, 4]), "ms") == "2 ms (1 to 4)"
    assert shown(spread([2]), "ms") == "2 ms (one round)"


def test_every_row_is_of_a_measure_that_a_function_makes_and_has_a_key_of_its_own():
    assert {each.measure for each in ROWS} == MEASURES.keys() == program.BY.keys()
    assert len({each.key for each in ROWS}) == len(ROWS)


def test_notes_are_of_measures_and_rows_that_are_there():
    notes = tomllib.loads(program._NOTES.read_text())
    assert notes.keys() <= MEASURES.keys() | {each.key for each in ROWS}


@pytest.mark.parametrize("name", MEASURES)
def test_the_code_that_a_measure_is_of_is_there(name):
    paths = [path for path in MEASURES[name][1] if not path.startswith(":")]
    assert [path for path in paths if not (program._ROOT / path).exists()] == []


def measure(figures: dict, *, is_stale: bool = False, quick: bool = False) -> dict:
    about = {"cpu": "a CPU", "cores": 2, "memory_bytes": 2**31, "kernel": "6", "versions": ["x 1"]}
    said = {"commit": "1234567890ab", "date": "2026-01-01", "machine": about, "busy": 0.25}
    return said | {"quick": quick, "is_stale": is_stale, "figures": figures}


def line_of(text: str, key: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {row(key).what} |"))


def test_each_row_says_what_it_is_worth_and_its_table_of_which_commit_and_date():
    met, missed = (page({"rest": measure({"cpu": spread([x] * 3)})}, {}) for x in (1.5, 1.7))

    assert line_of(met, "rest.cpu").endswith("| at most 1.6 x | 1.5 x (1.5 to 1.5): met |")
    assert line_of(missed, "rest.cpu").endswith(": missed |")
    assert "Commit 1234567890ab, 2026-01-01, 2 cores." in met
    assert line_of(met, LAST).endswith("| not measured on this code |")


@pytest.mark.parametrize(("how", "said"), [("is_stale", ") |"), ("quick", "): coarse |")])
def test_figures_of_older_code_or_of_a_quick_run_are_neither_met_nor_missed(how, said):
    figures = {"cpu": spread([1.0] * 3), "rate": spread([0.1] * 3), "adapter_rate": spread([9] * 3)}

    text = page({"rest": measure(figures, **{how: True})}, {"rest.rate": "a reason"})

    assert all(line_of(text, f"rest.{each}").endswith(said) for each in figures)
    assert ": met" not in text
    assert ": missed" not in text
    assert "a reason" not in text
    assert ("1234567890ab (older code)" in text) == (how == "is_stale")


def test_the_reason_for_a_miss_is_told_while_it_is_one():
    notes = {"rest.cpu": "the parser takes 20 µs\n"}
    met, missed = (page({"rest": measure({"cpu": spread([x] * 3)})}, notes) for x in (1.5, 1.7))

    assert "the parser takes 20 µs" in missed
    assert "the parser takes 20 µs" not in met


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


def test_figures_are_of_older_code_once_their_own_code_has_changed(repository):
    folder, git = repository
    commit = program.commit(["code"])
    (folder / "docs").write_text("2")
    git("commit", "-qam", "docs")
    assert git("rev-parse", "HEAD").startswith(commit) is False
    assert not program.is_stale(commit, ["code"])

    (folder / "code").write_text("2")
    assert program.is_stale(commit, ["code"])
    git("commit", "-qam", "code")
    assert program.is_stale(commit, ["code"])
    assert not program.is_stale(commit, ["docs", ":(exclude)docs"])


@pytest.mark.parametrize("change", ["code", "new"])
def test_only_changes_of_the_code_that_is_measured_make_a_commit_unsure(repository, change):
    folder, _ = repository
    (folder / "docs").write_text("the page, half written")
    assert not program.commit(["code"]).endswith("+")

    (folder / change).write_text("2")

    assert program.commit(["code", "new"]).endswith("+")
    assert program.is_stale(program.commit(["code", "new"]), ["code", "new"])


def test_figures_of_an_unknown_commit_are_of_older_code():
    assert program.is_stale("no-such-commit", ["adapter"])


@pytest.mark.slow
def test_a_run_of_some_leaves_the_others_and_what_is_said_of_them_alone(monkeypatch, tmp_path):
    def absent(_scale):
        raise NotMeasuredError("not here")

    def broken(_scale):
        raise FailedError("a call went wrong")

    by = {"rest": absent, "grpc": broken, "start": lambda scale: {"livez": spread([scale.models])}}
    monkeypatch.setattr(program, "BY", by)
    monkeypatch.setattr(program, "has_own_network", lambda: False)
    measures = {"many": {"date": "then"}, "rest": {"date": "before"}}

    failed = program.measure(list(by), QUICK, measures, tmp_path / "out" / "benchmarks.json")

    assert failed == ["grpc"]
    assert measures["many"] == {"date": "then"}
    assert measures["rest"] == {"date": "before"}
    assert measures["start"]["figures"] == {"livez": spread([QUICK.models])}
    assert measures["start"]["quick"]
    assert json.loads((tmp_path / "out" / "benchmarks.json").read_text()) == measures


def test_sides_take_turns_and_every_other_round_goes_backwards(monkeypatch):
    order = []

    def answered(url, *args):
        order.append((url, "--cpu-pid=7" in args))
        latency = {"p50": 1, "p99": 2}
        processes = [{"cpu_seconds_per_request": 3}]
        return {"rate": 4, "latency": latency, "generator_cpu_share": 8, "processes": processes}

    @contextmanager
    def noted():
        order.append("begins")
        yield
        order.append("ends")

    monkeypatch.setattr("tests.benchmarks.place.load", answered)

    found = in_turns({"one": Side(("a",), 7), "other": Side(("b",), meanwhile=noted)}, 2)

    one, other = ("a", True), ("b", False)
    assert order == [one, "begins", other, "ends", "begins", other, "ends", one]
    figures = {"rate": 4, "p50": 1, "p99": 2, "generator": 2}
    assert found == {"one": [figures | {"cpu": 3}] * 2, "other": [figures] * 2}


@pytest.mark.slow
def test_a_call_that_goes_wrong_fails_the_measure(server):
    with pytest.raises(FailedError, match="503 ModelNotReady"):
        load(server.url, "--models=m,busy", "--count=20")


@pytest.mark.parametrize("client", CLIENTS)
def test_a_recorded_head_says_whose_it_is_and_when_it_was_recorded(client):
    text = Path(head_of(client).removeprefix("--head=")).read_text()

    first, *rest = text.splitlines()
    assert first.startswith(f"# {client} ")
    assert first.rpartition(", recorded ")[2].count("-") == 2
    assert len(rest) > 3
    assert read_head(text)


@pytest.mark.parametrize(
    "client", ["tritonclient-grpc", "tritonclient-grpc-aio", "perf_analyzer-grpc"]
)
def test_recorded_metadata_is_what_calls_have_beside_what_all_have(client):
    names = [each.removeprefix("--header=").partition(":")[0] for each in metadata_of(client)]
    assert names == ["grpc-accept-encoding", "user-agent"]


def test_the_recorder_reads_heads_of_http_and_of_grpc():
    import hpack

    one = b"GET /v2 HTTP/1.1\r\nHost: h\r\n\r\nPOST /x/infer HTTP/1.1\r\nA: b\r\n\r\n{}"
    assert [path for path, _ in heads_in(one)] == ["/v2", "/x/infer"]
    assert list(heads_in(one))[1][1] == ["POST /x/infer HTTP/1.1", "A: b"]

    block = hpack.Encoder().encode([(":path", "/s/ModelInfer"), ("user-agent", "u")])
    frames = b"\0\0\0\x04\0\0\0\0\0" + len(block).to_bytes(3) + b"\x01\x04\0\0\0\x01" + block
    whole = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frames
    assert list(heads_in(whole)) == [
        ("/s/ModelInfer", [":path: /s/ModelInfer", "user-agent: u"]),
    ]
    assert list(heads_in(whole[:-1])) == []


@pytest.mark.slow
def test_the_adapter_takes_the_stand_in_for_a_triton():
    with running() as triton, external(triton.http, triton.grpc) as adapter:
        adapter.wait_for("adapter.started")
        load = json.dumps({"model_name": "m", "url": str(EXAMPLES / "identity")})
        with Exchange(adapter.http) as listener:
            listener.timed("POST", "/models", load.encode())
            listener.timed("POST", "/models/m/invoke", b'{"inputs": []}', times=3)
            listener.timed("POST", "/models", load.encode(), status=409)
            listener.timed("DELETE", "/models/m")
            listener.timed("GET", "/models/m", status=404)
            with pytest.raises(ValueError, match="404"):
                listener.timed("GET", "/models/m")
    assert adapter.process.returncode == 0

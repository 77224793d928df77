"""The program behind `make bench`: its arithmetic, its page, and the stand-in for Triton."""

import json

import pytest

from tests.benchmarks.__main__ import MEASURES, has_changed_since, measured
from tests.benchmarks.control import external
from tests.benchmarks.exchange import Exchange
from tests.benchmarks.figures import compared, p50, quantile, ratios, side, spread
from tests.benchmarks.page import page, shown
from tests.benchmarks.place import QUICK, NotMeasuredError
from tests.benchmarks.stand_in import running
from tests.benchmarks.targets import TARGETS, Target, is_met, number, spread_of
from tests.running import EXAMPLES

KEYS = [target.key for target in TARGETS]


def part(rate: float, p50: float | None, cpu: float | None = None, answered: int = 10) -> dict:
    processes = [] if cpu is None else [{"cpu_seconds_per_request": cpu}]
    latency = {"p50": p50, "p99": p50 and 2 * p50, "p99_9": p50}
    return {"rate": rate, "latency": latency, "processes": processes, "answered": answered}


def run_of(*slices: dict) -> dict:
    return {"answered": 10, "errors": 0, "generator_cpu_share": 0.5, "slices": list(slices)}


def target(**changes) -> Target:
    given = {"key": "k", "what": "w", "measure": "m", "path": ("a",), "bound": 40.0}
    return Target(**given | changes)


def test_a_spread_is_the_median_round_with_the_least_and_the_greatest():
    assert spread([3, 1, None, 2]) == {"median": 2, "min": 1, "max": 3, "rounds": 3}
    assert spread([None]) is None


@pytest.mark.parametrize(("share", "value"), [(0.5, 51), (0.99, 100), (0.0, 1), (1.0, 100)])
def test_a_quantile_is_one_of_the_values(share, value):
    assert quantile(range(100, 0, -1), share) == value
    assert p50([5]) == 5


def test_ratios_are_taken_round_by_round():
    assert ratios([10, 40], [5, 10]) == {"median": 3, "min": 2, "max": 4, "rounds": 2}


def test_two_targets_are_compared_slice_by_slice():
    adapter = run_of(part(80, 0.003, 4e-5), part(60, 0.005, 6e-5))
    triton = run_of(part(100, 0.001), part(100, 0.002))

    found = compared({"targets": [adapter, triton]})

    assert found["rate_ratio"] == spread([0.8, 0.6])
    assert found["p50_added"] == spread([0.003 - 0.001, 0.005 - 0.002])
    assert found["adapter"]["cpu_seconds_per_request"] == spread([4e-5, 6e-5])
    assert "cpu_seconds_per_request" not in found["other"]


def test_a_slice_without_an_answer_takes_no_part_in_ratios():
    silent = part(0, None, 1e-5, answered=0)
    adapter, triton = run_of(silent, part(60, 0.005, 1e-5)), run_of(part(9, 0.001), part(120, 0.01))

    assert compared({"targets": [adapter, triton]})["rate_ratio"] == spread([0.5])
    assert side(adapter, 0)["p50"] == spread([0.005])


@pytest.mark.parametrize(
    ("value", "at_most", "met"),
    [(40e-6, True, True), (41e-6, True, False), (40e-6, False, True), (39e-6, False, False)],
)
def test_a_bound_itself_is_met_in_the_units_of_the_target(value, at_most, met):
    assert is_met(target(scale=1e6, at_most=at_most), spread([value])) is met


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0018, "0.0018"), (0.02, "0.02"), (0.85, "0.85"), (3.0, "3"), (12.34, "12.3"),
     (40.0, "40"), (0.7, "0.7"), (1234.5, "1,234"), (-31.26, "-31.3"), (0.0, "0")],
)  # fmt: skip
def test_a_number_is_shown_with_the_digits_that_say_something(value, text):
    assert number(value, "") == text
    assert number(value, "ms") == f"{text} ms"


def test_a_figure_of_several_rounds_is_shown_with_its_spread():
    assert shown(spread([1e-3, 2e-3, 4e-3]), "ms", 1e3) == "2 ms (1 to 4)"
    assert shown(spread([2e-3]), "ms", 1e3) == "2 ms"
    assert shown(None) == "-"


def test_every_target_is_of_a_measure_and_has_a_key_of_its_own():
    assert {each.measure for each in TARGETS} <= MEASURES.keys()
    assert len(set(KEYS)) == len(KEYS)


def results_with(cpu: float) -> dict:
    about = {"cpu": "a CPU", "cores": 2, "memory_bytes": 2**31, "kernel": "6", "versions": ["x 1"]}
    side_of = {
        "cpu_seconds_per_request": spread([cpu]),
        "rate": spread([1]),
        "p50": spread([1]),
        "p99": spread([1]),
        "errors": 0,
    }
    each = {"adapter": side_of, "other": side_of, "rate_ratio": spread([0.9])}
    measure = {"date": "d", "quick": True, "seconds": 1, "figures": {"8": each}}
    return {
        "date": "2026-01-01",
        "environment": about | {"busy_before": 0.25},
        "measures": {"rest_small": measure},
    }


def row_of(text: str, what: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {what}"))


def test_the_page_says_met_missed_and_not_measured():
    met, missed = (page(results_with(cpu), {}, []) for cpu in (39e-6, 41e-6))

    assert row_of(met, TARGETS[0].what).endswith("| at most 40 µs | 39 µs | met |")
    assert row_of(missed, TARGETS[0].what).endswith("| 41 µs | missed |")
    assert row_of(met, TARGETS[-1].what).endswith("| not measured | - |")
    assert "Of a quick run, hence coarse: rest_small" in met


def test_the_reason_for_a_miss_stays_when_the_page_is_written_anew_and_goes_when_it_is_met():
    notes = {TARGETS[0].key: "the parser takes 20 µs\n"}

    assert "the parser takes 20 µs" in page(results_with(41e-6), notes, [])
    assert "the parser takes 20 µs" not in page(results_with(39e-6), notes, [])


@pytest.mark.slow
def test_what_cannot_be_measured_keeps_nothing_else_from_it(monkeypatch):
    def fails(_scale):
        raise NotMeasuredError("not here")

    measures = {"one": fails, "two": lambda scale: {"rounds": scale.rounds}}
    monkeypatch.setattr("tests.benchmarks.__main__.MEASURES", measures)
    monkeypatch.setattr("tests.benchmarks.__main__.has_own_network", lambda: False)
    results = {"measures": {"old": {"figures": {}}}}

    assert len(list(measured(results, ["one", "two"], QUICK))) == 1

    assert list(results["measures"]) == ["old", "two"]
    assert results["measures"]["two"]["figures"] == {"rounds": QUICK.rounds}


def test_a_figure_is_found_where_the_target_says():
    found = {"m": {"figures": {"a": {"b": {"median": 1}}}}}

    assert spread_of(target(path=("a", "b")), found) == {"median": 1}
    assert spread_of(target(path=("a", "c", "d")), found) is None
    assert spread_of(target(), {}) is None


@pytest.mark.slow
def test_the_adapter_takes_the_stand_in_for_a_triton():
    with running() as triton, external(triton.http, triton.grpc) as adapter:
        adapter.wait_for("adapter.started")
        load = json.dumps({"model_name": "m", "url": str(EXAMPLES / "identity")})
        with Exchange(adapter.http) as door:
            door.timed("POST", "/models", load.encode())
            door.timed("POST", "/models/m/invoke", b'{"inputs": []}', times=3)
            door.timed("POST", "/models", load.encode(), status=409)
            door.timed("DELETE", "/models/m")
            door.timed("GET", "/models/m", status=404)
            with pytest.raises(ValueError, match="404"):
                door.timed("GET", "/models/m")
    assert adapter.process.returncode == 0


def test_figures_of_older_code_are_neither_met_nor_missed():
    results = results_with(39e-6)
    for each in results["measures"].values():
        each["is_stale"] = True
    written = page(results, {}, [])
    assert "| of older code |" in written
    assert "| met |" not in written
    assert "say nothing of this code" in written


@pytest.mark.parametrize("commit", [None, "1234567890ab+", "no-such-commit"])
def test_figures_whose_code_nobody_knows_are_of_older_code(commit):
    assert has_changed_since(commit)

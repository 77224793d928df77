"""The drawing says what was measured, in plain figures, and nothing on it covers anything else."""

import copy
import itertools
import math
import re
from contextlib import closing
from functools import cache

import pytest

from adapter.tools.bench.plot import _place, _with_gaps, figure_of
from tests.bench.servers import Bench, HttpServer, holds_once

PLAIN = re.compile(r"^(min|p\d+(\.\d+)?|\d{1,3}(,\d{3})*(\.\d+)?)$")
BRIEF = ("--duration=0.5", "--interval=0.1", "--slices=1", "--connections=2")
NORMAL, OPEN, CHURN, ERRORS = "normal", "open loop", "churn and compare", "errors alone"


def drawn(result):
    """The figure, laid out as it is when it is written."""
    figure = figure_of(result)
    figure.draw_without_rendering()
    return figure


def ticks(figure):
    """The texts of the ticks that are drawn."""
    axis = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    assert [each.get_offset_text().get_text() for each in axis] == [""] * len(axis)
    labels = [tick.label1 for each in axis for tick in each._update_ticks()]
    return [label for label in labels if label.get_text()]


def texts(figure):
    found = [figure._suptitle, *ticks(figure)]
    for axes in figure.axes:
        found += [axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        found += axes.get_legend().get_texts() if axes.get_legend() else []
    return [each for each in found if each.get_text()]


def names(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Measure one of the kinds of run, once, and return a copy of its result."""
    with closing(HttpServer()) as server, closing(HttpServer()) as other:
        flags = {
            NORMAL: ("--model=m",),
            OPEN: ("--model=m", "--rate=200"),
            CHURN: ("--model=m", "--churn=/m", f"--compare={other.url}"),
            ERRORS: ("--model=busy",),
        }
        bench = Bench(tmp_path_factory.mktemp("runs"))
        results = {}

        def is_measured(kind: str, given: tuple[str, ...]) -> bool:
            """Of fewer answers than 100 there is no p90."""
            results[kind] = bench(server.url, *given, *BRIEF).result
            return kind != NORMAL or results[kind]["targets"][0]["answered"] >= 100

        for kind, given in flags.items():
            assert holds_once(lambda kind=kind, given=given: is_measured(kind, given))
        yield lambda kind: copy.deepcopy(results[kind])


@pytest.fixture(scope="module")
def picture(run):
    """Draw a kind of run with latencies so many times as long, once: it is only looked at."""
    return cache(lambda kind, factor: drawn(scaled(run(kind), factor)))


every_kind = pytest.mark.parametrize("kind", [NORMAL, OPEN, CHURN, ERRORS])
pytestmark = pytest.mark.slow


def test_the_heading_says_what_was_measured_how_when_and_with_which_version(run):
    result = run(OPEN)
    (target,) = result["targets"]
    heading = figure_of(result).get_suptitle()

    for part in (
        f"{target['url']} sagemaker-json: {target['answered']:,} answered, ",
        "m, open loop of 200/s (constant), 2 connections, 0.5 s, requests of ",
        f"{result['started_at'][:10]} {result['started_at'][11:19]} UTC",
        f"triton-adapter bench {result['version']}, on {result['machine']}",
    ):
        assert part in heading


def test_the_heading_names_failures_by_kind(run):
    heading = figure_of(run(ERRORS)).get_suptitle()

    assert re.search(r": 0 answered, .* failed: [\d,]+ x \d{3} ", heading)


@every_kind
def test_axes_are_named_with_their_units(run, kind):
    curve, latency, rate = figure_of(run(kind)).axes

    assert [axes.get_ylabel() for axes in (curve, latency, rate)] == [
        "latency (ms)",
        "latency (ms)",
        "requests per second",
    ]
    assert [axes.get_xlabel() for axes in (latency, rate)] == ["time since the start (s)"] * 2
    assert "percentile" in curve.get_xlabel()
    assert all(axes.get_title(loc="left") for axes in (curve, latency, rate))


@every_kind
@pytest.mark.parametrize("factor", [1e-1, 1, 1e3], ids=["microseconds", "as it was", "seconds"])
def test_ticks_are_plain_numbers(picture, kind, factor):
    found = [tick.get_text() for tick in ticks(picture(kind, factor))]

    assert len(found) > 8
    assert [tick for tick in found if not PLAIN.match(tick)] == []


def scaled(result, factor):
    """Return the run with latencies so many times as long, rates as much lower, many answers."""
    for target in result["targets"]:
        target["answered"] *= 100
        target["curve"] = [[percent, value * factor] for percent, value in target["curve"]]
        for part in (target["latency"], *target["timeline"]):
            for name in set(part) & {"p50", "p90", "p99", "p99_9"}:
                part[name] = part[name] and part[name] * factor
        for part in target["timeline"]:
            part["rate"] /= factor
    return result


@every_kind
@pytest.mark.parametrize("factor", [1e-1, 1, 1e3], ids=["microseconds", "as it was", "seconds"])
def test_no_text_covers_another_or_leaves_the_picture(picture, kind, factor):
    figure = picture(kind, factor)
    boxes = [(each.get_text(), each.get_window_extent()) for each in texts(figure)]
    ends = figure.bbox

    assert [text for text, box in boxes if box.x0 < 0 or box.x1 > ends.x1 or box.y1 > ends.y1] == []
    pairs = itertools.combinations(boxes, 2)
    assert [(one, two) for (one, a), (two, b) in pairs if one != two and a.overlaps(b)] == []


def test_each_line_is_named_with_its_percentile(run):
    curve, latency, rate = figure_of(run(NORMAL)).axes

    assert re.match(r"p50 [\d.,]+, p90 [\d.,]+.* ms$", names(curve)[0])
    assert names(latency) == ["p50", "p99"]
    assert names(rate) == ["answered"]


def test_two_targets_are_named_and_loads_and_unloads_once_each(run):
    result = run(CHURN)
    curve, latency, rate = figure_of(result).axes
    heading = figure_of(result).get_suptitle().splitlines()

    assert [line[:9] for line in heading[:2]] == ["A http://", "B http://"]
    assert [name[:6] for name in names(curve)] == ["A p50 ", "B p50 "]
    assert names(latency)[:4] == ["A p50", "A p99", "B p50", "B p99"]
    assert sorted(set(names(latency)[4:])) == sorted(names(latency)[4:])
    assert set(names(latency)[4:]) <= {"load", "unload"}
    assert names(latency)[4:]
    assert names(rate) == ["A answered", "B answered"]


def test_the_rate_that_was_asked_for_is_drawn_beside_that_of_the_answers(run):
    rate = figure_of(run(OPEN)).axes[2]

    assert names(rate) == ["answered", "200/s due"]
    assert rate.get_ylim()[1] > 200


def test_failures_alone_are_drawn_and_the_empty_charts_say_so(run):
    figure = drawn(run(ERRORS))
    curve, latency, rate = figure.axes

    for axes in (curve, latency):
        assert [each.get_text() for each in axes.texts] == ["no request was answered"]
    assert names(rate) == ["answered", "failed"]


@every_kind
def test_no_line_touches_the_frame(run, kind):
    for axes in figure_of(run(kind)).axes:
        low, high = axes.get_ylim()
        values = [value for line in axes.get_lines() for value in line.get_ydata()]
        values = [value for value in values if not math.isnan(value)]
        assert all(value < high for value in values)
        assert low == 0 or all(value > low for value in values)


def test_a_line_of_the_plot_ends_where_the_other_target_was_measured():
    timeline = [{"at": at, "seconds": 1.0, "p50": 1, "p99": 1, "rate": 1} for at in (0, 1, 5, 6)]
    assert [each["p50"] for each in _with_gaps(timeline, 0.2)] == [1, 1, None, 1, 1]


@pytest.mark.parametrize(("answered", "last"), [(17_000, 99.9), (200_000, 99.99), (30, 50)])
def test_the_plot_has_no_percentile_that_a_few_answers_make(run, answered, last):
    result = run(NORMAL)
    (target,) = result["targets"]
    target["curve"] = [[percent, 0.001] for percent in (0, 50, 90, 99, 99.9, 99.99, 100.0)]
    target["answered"] = answered

    (line,) = figure_of(result).axes[0].get_lines()

    assert line.get_xdata()[-1] == _place(last)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_plot_is_written_as_the_ending_of_its_name_says(
    bench, server, other_server, tmp_path, ending
):
    path = tmp_path / f"plot.{ending}"

    bench(server.url, "--model=m", f"--compare={other_server.url}", *BRIEF, f"--plot={path}")

    assert bench.code == 0
    assert path.read_bytes()[:5] in {b"\x89PNG\r", b"<?xml"}
    assert path.stat().st_size > 10_000


def test_a_plot_of_failures_alone_is_written(bench, server, tmp_path):
    path = tmp_path / "plot.png"

    bench(server.url, "--model=busy", "--count=3", f"--plot={path}")

    assert bench.code == 1
    assert path.read_bytes().startswith(b"\x89PNG")

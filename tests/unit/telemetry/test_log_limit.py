import logging
from collections.abc import Callable

import pytest

from adapter.errors import InferenceFailed, ModelNotFound
from adapter.telemetry.log import LogLimit

NOT_FOUND, FAILED = ModelNotFound("no"), InferenceFailed("it raised", model_id="m")


class Later(list[Callable[[], None]]):
    def __call__(self, seconds: float, act: Callable[[], None]) -> None:
        assert seconds == 1
        self.append(act)

    def pass_by(self) -> None:
        (act,) = self
        self.clear()
        act()


@pytest.fixture
def later() -> Later:
    return Later()


@pytest.fixture
def limit(later: Later, caplog: pytest.LogCaptureFixture) -> LogLimit:
    caplog.set_level(logging.INFO)
    return LogLimit("http", call_later=later)


def admitted(limit: LogLimit, error: Exception, count: int) -> int:
    return sum(limit.admits(error, logging.INFO) for _ in range(count))


def test_twenty_lines_a_second_are_admitted(limit, later, caplog):
    assert admitted(limit, NOT_FOUND, 25) == 20
    later.pass_by()
    (line,) = caplog.records
    said = (line.message, line.levelname, line.listener, line.error, line.requests)
    assert said == ("request.failed_again", "INFO", "http", "ModelNotFound", 5)


def test_each_busy_second_has_a_line(limit, later, caplog):
    for lines, count in ((20, 25), (1, 25), (1, 5), (20, 25)):
        assert admitted(limit, NOT_FOUND, count) == lines
        later.pass_by()
    assert [line.requests for line in caplog.records] == [5, 24, 4, 5]


def test_sum_is_omitted_where_nothing_is(limit, later, caplog):
    admitted(limit, NOT_FOUND, 20)
    later.pass_by()
    assert (caplog.records, later) == ([], [])


def test_models_failure_has_its_own_lines(limit, later, caplog):
    assert admitted(limit, FAILED, 25) == 20
    assert admitted(limit, InferenceFailed("it raised", model_id="other"), 25) == 20
    later.pass_by()
    assert [(line.model_id, line.requests) for line in caplog.records] == [("m", 5), ("other", 5)]


def test_at_debug_each_has_its_line(limit, caplog):
    caplog.set_level(logging.DEBUG)
    assert admitted(limit, NOT_FOUND, 25) == 25

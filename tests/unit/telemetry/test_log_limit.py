import logging
from collections.abc import Callable

import pytest

from adapter.errors import InferenceFailed, InvalidRequest, ModelNotFound
from adapter.telemetry.log_limit import LogLimit

NOT_FOUND, FAILED = ModelNotFound("no"), InferenceFailed("it raised")


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
    return LogLimit("http", later=later)


def admitted(limit: LogLimit, error: Exception, count: int) -> int:
    return sum(limit.admits(error, logging.INFO) for _ in range(count))


def test_twenty_lines_a_second_are_admitted_and_the_others_summed_up(limit, later, caplog):
    assert admitted(limit, NOT_FOUND, 25) == 20
    later.pass_by()
    (line,) = caplog.records
    said = (line.message, line.levelname, line.listener, line.error, line.requests)
    assert said == ("request.failed_again", "INFO", "http", "ModelNotFound", 5)
    assert admitted(limit, NOT_FOUND, 25) == 20


def test_another_error_has_twenty_of_its_own(limit):
    admitted(limit, NOT_FOUND, 25)
    assert admitted(limit, InvalidRequest("odd"), 25) == 20


def test_nothing_is_summed_up_where_each_has_its_line(limit, later, caplog):
    admitted(limit, NOT_FOUND, 20)
    later.pass_by()
    assert (caplog.records, later) == ([], [])


def test_what_a_model_fails_with_has_a_line_each(limit, later):
    assert admitted(limit, FAILED, 25) == 25
    assert later == []


def test_at_debug_each_has_its_line(limit, caplog):
    caplog.set_level(logging.DEBUG)
    assert admitted(limit, NOT_FOUND, 25) == 25

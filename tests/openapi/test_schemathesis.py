"""A real adapter in front of a real Triton answers as docs/openapi.yaml says, whatever it is asked.

schemathesis.toml has what is excepted from its checks, with the reasons.
"""

import re
from contextlib import closing
from pathlib import Path

import pytest

from tests.openapi.playing import (
    AT_ADMIN,
    AT_HTTP,
    CHANGING,
    CYCLE,
    only,
    phases,
    play,
    without,
)
from tests.running import EXAMPLES, RunningAdapter, unload_all

pytestmark = [pytest.mark.triton, pytest.mark.timeout(1100)]

# The same requests each time; `make nightly PARTS=openapi` sends others, made at random as well.
KNOWN = phases("examples", "coverage")
BOUNDED = ("--generation-deterministic", "--max-examples=4")


@pytest.fixture
def identity(opened: RunningAdapter):
    """The model that requests are about is loaded."""
    with closing(opened.client()) as client:
        assert client.load("identity", EXAMPLES / "identity").status == 200
    yield opened
    unload_all(opened)


def test_each_call_of_callers_is_answered_as_described(identity: RunningAdapter, tmp_path: Path):
    play(identity.http, tmp_path, *AT_HTTP, *without(CHANGING), *BOUNDED, KNOWN)
    # what the requests have left there is described as well
    play(identity.admin, tmp_path, *AT_ADMIN, *BOUNDED, KNOWN)


def test_calls_that_change_models_are_answered_as_described(opened: RunningAdapter, tmp_path: Path):
    play(opened.http, tmp_path, *only(CHANGING), *BOUNDED, KNOWN)
    unload_all(opened)


def test_models_follow_the_links_in_any_order(opened: RunningAdapter, tmp_path: Path):
    told = play(opened.http, tmp_path, *only(CYCLE), *BOUNDED, phases("stateful"))

    covered = re.search(r"API Links: +(\d+) covered", told)
    assert covered is not None
    assert int(covered[1]) >= 5, told

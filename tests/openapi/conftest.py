"""Fixtures only."""

from collections.abc import Iterator

import pytest

from tests.openapi.playing import opened_adapter
from tests.running import RunningAdapter


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAdapter]:
    with opened_adapter(tmp_path_factory.mktemp("cache")) as adapter:
        yield adapter

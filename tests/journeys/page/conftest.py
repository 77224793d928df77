"""One browser for each file of tests."""

from collections.abc import Iterator

import pytest

from tests.journeys.page.browser import Browser, chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found

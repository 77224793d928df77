"""Virtual time: a minute passes at once."""

from tests.control.virtual import pytest_asyncio_loop_factories, virtual_time  # noqa: F401

"""HTTP is tested on both event loops: they differ in when they write and what they close."""

import asyncio

import uvloop

_BOTH = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_asyncio_loop_factories(config, item):
    if item.path.name.startswith("test_http_"):
        return _BOTH
    return {"asyncio": asyncio.new_event_loop}

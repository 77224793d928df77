"""Everything is tested on uvloop, which the adapter runs on; the marker asks for asyncio's too.

They differ in when they write and what they close, and asyncio's is what a reader debugs with.
"""

import asyncio

import uvloop

_BOTH = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


def pytest_asyncio_loop_factories(config, item):
    return _BOTH if item.get_closest_marker("both_loops") else {"uvloop": uvloop.new_event_loop}

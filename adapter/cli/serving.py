"""Runs the serving process from its start to the signal that ends it."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable

import uvloop

from adapter.app import Adapter
from adapter.assembly import own_version
from adapter.errors import AdapterError
from adapter.runtime import tuning
from adapter.settings import Loaded
from adapter.telemetry.log import setup_logging
from adapter.telemetry.log_stream import LogStream
from adapter.telemetry.tracing import tracing_of

log = logging.getLogger(__name__)

_LAST_LINES_SECONDS = 1.0


def run(loaded: Loaded, on_started: Callable[[Adapter], None] | None = None) -> int:
    """Run `serve` with a log on stdout and a new event loop; return the exit code."""
    stream = LogStream(sys.stdout.fileno(), is_terminal=sys.stdout.isatty())
    setup_logging(loaded.settings.log_level, loaded.settings.log_format, stream)
    for warning in loaded.warnings:
        log.warning("settings.ignored", extra={"reason": warning})
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(loaded, on_started))
    finally:
        stream.drain(_LAST_LINES_SECONDS)


async def serve(loaded: Loaded, on_started: Callable[[Adapter], None] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Returns 0 when drained, 1 if it could not start."""
    tracing = tracing_of(os.environ, own_version())
    tuning.tune()
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    adapter: Adapter | None = None
    stopping = asyncio.create_task(asked.wait())
    try:
        adapter = Adapter(loaded, tracing)
        starting = asyncio.create_task(adapter.start())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
        else:
            starting.result()
            tuning.settle()
            if on_started is not None:
                on_started(adapter)
        await stopping
    except (AdapterError, OSError) as error:
        log.error("adapter.failed", extra={"reason": str(error)})  # noqa: TRY400 - no bug
        sys.stderr.write(f"triton-adapter: {error}\n")
        return 1
    finally:
        stopping.cancel()
        log.info("adapter.stopping")
        if adapter is not None:
            await adapter.stop()
        log.info("adapter.stopped")
    return 0

"""Runs the serving process from its start to the signal that ends it."""

import asyncio
import importlib.util
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping

import uvloop

from adapter.app import Adapter
from adapter.cli.options import examples_folder
from adapter.cli.text import printable_lines
from adapter.errors import AdapterError
from adapter.runtime import background, tuning
from adapter.settings import Loaded, Settings, variable_of
from adapter.telemetry.log import LogStream, is_text, setup_logging
from adapter.telemetry.metrics import own_version
from adapter.telemetry.tracing import tracing_of

log = logging.getLogger(__name__)

_LAST_LINES_SECONDS = 1.0
LACKS_ONNXRUNTIME = (
    "its model digits needs onnxruntime, which is not installed: pip install onnxruntime "
    "'numpy<2'; in a clone, pip install '.[embedded,examples]'"
)


def run(loaded: Loaded, on_started: Callable[[Adapter], None] | None = None) -> int:
    """Run `serve` with a log on stdout and a new event loop; return the exit code."""
    stream = LogStream(sys.stdout.fileno(), is_terminal=sys.stdout.isatty())
    setup_logging(loaded.settings.log_level, loaded.settings.log_format, stream)
    for warning in loaded.warnings:
        log.warning("settings.odd", extra={"reason": warning})
    _log_roots(loaded)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(loaded, on_started))
    finally:
        stream.drain(_LAST_LINES_SECONDS)


def _log_roots(loaded: Loaded) -> None:
    """Say what a misspelt root would hide. The defaults need not be there, nor those of a mesh."""
    origin = loaded.origins["model_roots"]
    is_asked = origin.startswith(("flag", "file", "environment ADAPTER_"))
    for root in loaded.settings.model_roots if is_asked else ():
        fields = {"root": str(root), "path": os.path.realpath(root), "origin": origin}
        if not root.is_dir():
            log.warning("adapter.root_missing", extra=fields)
        elif not root.is_absolute():
            log.info("adapter.root_relative", extra=fields)


def _is_reported(loaded: Loaded) -> bool:
    """Return whether the reader of stderr has already read the reason in the log."""
    is_read = sys.stdout.isatty() or os.path.sameopenfile(1, 2)
    return is_text(loaded.settings.log_format, sys.stdout) and is_read


def _suggest_other_ports(error: Exception) -> str:
    """Return the end of a sentence about a port that is taken, for those who typed `make run`."""
    if not isinstance(error, OSError) or "already in use" not in str(error):
        return ""
    return "; make run takes others: HTTP=127.0.0.1:9080 ADMIN=127.0.0.1:9081 GRPC=127.0.0.1:9085"


async def serve(loaded: Loaded, on_started: Callable[[Adapter], None] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Returns 0 when drained, 1 if it could not start."""
    tracing = tracing_of(os.environ, own_version())
    tuning.tune()
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    adapter: Adapter | None = None
    stopping = asyncio.create_task(asked.wait())
    every = tuning.GIVE_BACK_SECONDS
    returns = background.forever(tuning.MemoryReturns().give_back, seconds=every)
    giving_back = background.begin("memory-returns", returns)
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
        # `serve --examples`, as `make run` calls it, has something to print when it is ready
        reason = f"{error}{_suggest_other_ports(error) if on_started else ''}"
        log.error("adapter.failed", extra={"reason": reason})  # noqa: TRY400 - no bug
        if not _is_reported(loaded):
            sys.stderr.write(printable_lines(f"triton-adapter: {reason}\n"))
        return 1
    finally:
        stopping.cancel()
        background.end(giving_back)
        log.info("adapter.stopping")
        if adapter is not None:
            await adapter.stop()
        log.info("adapter.stopped")
    return 0


def lacks_onnxruntime() -> bool:
    """Return whether the wheel's tritonserver would be run, in whose environment it is missing."""
    is_of_wheel = shutil.which("tritonserver") is None
    return is_of_wheel and importlib.util.find_spec("onnxruntime") is None


def welcome(adapter: Adapter) -> None:
    """Print the listeners and three commands to paste, on stderr: stdout is for the log."""
    base, folder = f"http://{adapter.addresses['http']}", examples_folder()
    listeners = "\n".join(
        f"  {name:<9} {'' if name.startswith('grpc') else 'http://'}{at}"
        for name, at in adapter.addresses.items()
    )
    note = f"\nBut {LACKS_ONNXRUNTIME}\n" if lacks_onnxruntime() else ""
    note += _elsewhere(adapter.addresses)
    admin = adapter.addresses.get("admin", "/")
    page = "" if "/" in admin else f"\nWatch it in a browser: http://{admin}/\n"
    load = json.dumps({"model_name": "digits", "url": str(folder / "digits")})
    said = (
        f"\nReady. Listeners:\n{listeners}\n\nTry, in another terminal:\n\n"
        f"  curl -s -X POST {base}/models -d '{load}'\n"
        f"  curl -s -w '\\n' -X POST {base}/models/digits/invoke"
        f" --data @{folder / 'digits/sample.json'}\n"
        f"  curl -s -X DELETE {base}/models/digits\n{page}{note}\nCtrl-C stops everything.\n\n"
    )
    sys.stderr.write(printable_lines(said))


def _elsewhere(addresses: Mapping[str, str]) -> str:
    """Return variables for the other commands, of listeners that are not at their defaults."""
    moved = {
        variable_of(name): addresses[name]
        for name in ("http", "admin", "grpc")
        if name in addresses and addresses[name] != str(Settings.model_fields[name].default)
    }
    if not moved:
        return ""
    words = " ".join(f"{variable}={address}" for variable, address in moved.items())
    return f"\nFor `triton-adapter ps` and the other commands there:\n\n  export {words}\n"

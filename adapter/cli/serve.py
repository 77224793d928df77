"""Runs an adapter until a signal: the command serve."""

import argparse
import asyncio
import importlib.util
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from adapter.cli.options import add_settings, read_settings
from adapter.cli.text import escape_lines
from adapter.errors import AdapterError

# Imported by the functions: `serve --help` and completion scripts do without the whole adapter.
if TYPE_CHECKING:
    from adapter.app import Adapter
    from adapter.settings import Loaded

log = logging.getLogger(__name__)

OnStarted = Callable[["Adapter"], None]

_LAST_LINES_SECONDS = 1.0
_NO_ONNXRUNTIME = (
    "But its model digits needs onnxruntime, which is not installed: pip install onnxruntime "
    "'numpy<2'; in a clone, pip install '.[embedded,examples]'"
)
_OTHER_PORTS = (
    "; make run takes others: HTTP=127.0.0.1:9080 ADMIN=127.0.0.1:9081 GRPC=127.0.0.1:9085"
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    text = "add the example models to model_roots, and print curl lines for them"
    parser.add_argument("--examples", action="store_true", help=text)
    add_settings(parser)


def _serve(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Load the settings, erase secrets from this process's environment, and run the adapter."""
    # gRPC would write to stderr at each fork; it reads this variable when it is imported
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    loaded = read_settings(args, environ)
    if args.examples:
        loaded = loaded.with_root(_examples_folder())
    from adapter.runtime.variables import erase_values  # noqa: PLC0415 - ctypes
    from adapter.settings import SECRETS, secret_variables, variable_of  # noqa: PLC0415 - pydantic

    secrets = {variable_of(name) for name in SECRETS}
    # models of an embedded Triton run as the same user, and could read /proc/PID/environ
    erase_values(secrets | secret_variables(loaded.settings.endpoint_keys))
    for name in secrets:  # Triton and its models need none of the adapter's own secrets
        os.environ.pop(name, None)
    return run(loaded, print_welcome if args.examples else None)


def _examples_folder() -> Path:
    """Return where the example models are: in the installed package, or beside it in a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "_examples"
    return installed if installed.is_dir() else package.parent / "examples" / "models"


def run(loaded: "Loaded", on_started: OnStarted | None = None) -> int:
    """Run an adapter with a log on stdout and a new event loop; return the exit code."""
    import uvloop  # noqa: PLC0415 - see above

    from adapter.telemetry.log import LogStream, setup_logging  # noqa: PLC0415

    stream = LogStream(sys.stdout.fileno(), is_terminal=sys.stdout.isatty())
    setup_logging(loaded.settings.log_level, loaded.settings.log_format, stream)
    for warning in loaded.warnings:
        log.warning("settings.odd", extra={"reason": warning})
    _log_roots(loaded)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve_until_signal(loaded, on_started))
    finally:
        stream.drain(_LAST_LINES_SECONDS)


def _log_roots(loaded: "Loaded") -> None:
    """Log model roots that do not exist or are relative paths.

    The default roots, and those that ModelMesh sets, need not exist.
    """
    origin = loaded.origins["model_roots"]
    if not origin.startswith(("flag", "file", "environment ADAPTER_")):
        return
    for root in loaded.settings.model_roots:
        fields = {"root": str(root), "path": os.path.realpath(root), "origin": origin}
        if not root.is_dir():
            log.warning("adapter.root_missing", extra=fields)
        elif not root.is_absolute():
            log.info("adapter.root_relative", extra=fields)


async def _serve_until_signal(loaded: "Loaded", on_started: OnStarted | None) -> int:
    """Run until SIGTERM or SIGINT. Return 0 when drained, 1 if the adapter could not start."""
    from adapter.app import Adapter  # noqa: PLC0415 - see above
    from adapter.runtime import background, tuning  # noqa: PLC0415
    from adapter.telemetry.metrics import own_version  # noqa: PLC0415
    from adapter.telemetry.tracing import tracing_of  # noqa: PLC0415

    tracing = tracing_of(os.environ, own_version())
    tuning.tune()
    stop_requested = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop_requested.set)
    adapter: Adapter | None = None
    stopping = asyncio.create_task(stop_requested.wait())
    give_back = tuning.MemoryReturns().give_back
    memory_returns = background.begin(
        "memory-returns", background.forever(give_back, seconds=tuning.GIVE_BACK_SECONDS)
    )
    try:
        adapter = Adapter(loaded, tracing)
        starting = asyncio.create_task(adapter.start())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            tuning.settle()
            if on_started is not None:
                on_started(adapter)
        else:
            starting.cancel()
            await asyncio.wait({starting})
        await stopping
    except (AdapterError, OSError) as error:
        # only `make run` has something to print once the adapter has started
        is_port_taken = isinstance(error, OSError) and "already in use" in str(error)
        hint = _OTHER_PORTS if is_port_taken and on_started is not None else ""
        _report_failure(f"{error}{hint}", loaded)
        return 1
    finally:
        stopping.cancel()
        background.end(memory_returns)
        log.info("adapter.stopping")
        if adapter is not None:
            await adapter.stop()
        log.info("adapter.stopped")
    return 0


def _report_failure(reason: str, loaded: "Loaded") -> None:
    """Log why the adapter failed; write it to stderr too, unless the log is shown there."""
    from adapter.telemetry.log import is_text  # noqa: PLC0415 - see above

    log.error("adapter.failed", extra={"reason": reason})
    is_log_visible = sys.stdout.isatty() or os.path.sameopenfile(1, 2)
    if not (is_log_visible and is_text(loaded.settings.log_format, sys.stdout)):
        sys.stderr.write(escape_lines(f"triton-adapter: {reason}\n"))


def print_welcome(adapter: "Adapter") -> None:
    """Print the listeners and three commands to paste, on stderr: stdout is for the log."""
    addresses = adapter.addresses
    base = f"http://{addresses['http']}"
    digits = _examples_folder() / "digits"
    load = json.dumps({"model_name": "digits", "url": str(digits)})
    lines = ["", "Ready. Listeners:"]
    for name, address in addresses.items():
        lines.append(f"  {name:<9} {'' if name.startswith('grpc') else 'http://'}{address}")
    lines += [
        "",
        "Try, in another terminal:",
        "",
        f"  curl -s -X POST {base}/models -d '{load}'",
        f"  curl -s -w '\\n' -X POST {base}/models/digits/invoke --data @{digits / 'sample.json'}",
        f"  curl -s -X DELETE {base}/models/digits",
        "",
    ]
    admin = addresses.get("admin", "/")
    if "/" not in admin:  # a socket in the file system
        lines += [f"Watch it in a browser: http://{admin}/", ""]
    # a Triton of the wheel runs in the Python environment of the adapter
    is_of_wheel = shutil.which("tritonserver") is None
    if is_of_wheel and importlib.util.find_spec("onnxruntime") is None:
        lines += [_NO_ONNXRUNTIME, ""]
    variables = _list_variables(addresses)
    if variables:
        lines += ["For `triton-adapter ps` and the other commands there:", ""]
        lines += [f"  export {variables}", ""]
    lines += ["Ctrl-C stops everything.", "", ""]
    sys.stderr.write(escape_lines("\n".join(lines)))


def _list_variables(addresses: Mapping[str, str]) -> str:
    """Return the variables by which other commands find listeners not at their defaults."""
    from adapter.settings import Settings, variable_of  # noqa: PLC0415 - pydantic

    return " ".join(
        f"{variable_of(name)}={addresses[name]}"
        for name in ("http", "admin", "grpc")
        if name in addresses and addresses[name] != str(Settings.model_fields[name].default)
    )


COMMANDS = {"serve": (_add_options, _serve)}

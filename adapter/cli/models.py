"""Lists, loads and unloads the models of a running adapter: ps, load and unload."""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import quote

from adapter.cli.client import (
    OUTSIDE_ROOTS,
    Answer,
    Refused,
    Target,
    Unreachable,
    ask,
    find_target,
    read_state,
    show_failure,
)
from adapter.cli.live import progress, watch
from adapter.cli.options import add_listeners, add_token, control_headers, positive
from adapter.cli.parser import PROG
from adapter.cli.text import BOLD, GREEN, RED, YELLOW, coloured, columns, duration, printable
from adapter.core.ledger import NOT_MEASURED
from adapter.core.sizing import format_size
from adapter.errors import AdapterError, InvalidSettings

_POLL_SECONDS = 0.25
_MAX_FAILURES = 5
_MAX_FAILURE_AGE_SECONDS = 600.0  # in the table; --json has them all
# The newest of these is always listed, even if other failures are newer.
_MEMORY_CODES = frozenset({"InsufficientMemory", "OutOfMemory", "ModelTooLarge", "NoRoom"})
_ADMIN_HINT = "only the admin listener tells this; --admin or --url say where it is"
_JSON_PARTS = ("memory", "models", "on_demand", "lost", "failures")
_MAX_AWAITED = 4
_DEVICE_HEAD = ["DEVICE", "USED", "FREE", "LIMIT", "UNACCOUNTED"]
_DEVICE_RIGHT = frozenset({1, 2, 3, 4})
_HEAD = ["NAME", "STATE", "SIZE", "BASIS", "IN FLIGHT", "IDLE", "LOADED FOR"]
_RIGHT = frozenset({2, 4, 5, 6, 7})
_COLOURS = {"READY": GREEN, "LOADING": YELLOW, "UNLOADING": YELLOW, "DEAD": RED}
# Words for the values of `waits_for` in /debug/state.
_WAITS = {
    "package": "unpacking",
    "turn": "waiting for its turn",
    "memory": "waiting for memory",
    "files": "placing files",
    "thread": "waiting for one of Triton's load threads",
    "triton": "waiting for Triton",
    "requests": "waiting for requests",
    "undoing": "undoing",
}


# -- ps -----------------------------------------------------------------------------------------


def _ps_options(parser: argparse.ArgumentParser) -> None:
    text = "only these models (default: all)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=text)
    text = (
        "refresh in place, every SECONDS (default: 1), until Ctrl-C or SIGTERM; without a "
        "terminal print one view after another"
    )
    parser.add_argument(
        "-w", "--watch", nargs="?", const=1.0, type=positive, metavar="SECONDS", help=text
    )
    parser.add_argument("--json", action="store_true", help="as JSON, one object a line")
    add_listeners(parser, "admin")


def _ps(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    target = find_target(args, environ, "admin")
    table = ModelTable()

    def read_lines() -> list[str]:
        state = _select(read_state(target), args.names)
        is_known = state["models"] or state.get("lost") or _is_asked_for(state)
        if args.names and args.watch is None and not is_known:
            raise AdapterError(f"no model {' or '.join(map(repr, args.names))} is loaded")
        if args.json:
            return [json.dumps({name: state[name] for name in _JSON_PARTS if name in state})]
        return [*device_lines(state["memory"]), "", *table.lines(state)]

    return _show(read_lines, target, args)


def _select(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the state with these models alone, or with all if no name is given."""
    if not names:
        return state
    parts = {
        part: [entry for entry in state.get(part, []) if entry["model_id"] in names]
        for part in ("models", "lost", "failures")
    }
    on_demand = state["on_demand"]
    if on_demand is not None:
        models = [model for model in on_demand["models"] if model["model_id"] in names]
        parts["on_demand"] = on_demand | {"models": models}
    return state | parts


def _is_asked_for(state: dict[str, Any]) -> bool:
    """Return whether calls have asked for a model that may not be loaded yet."""
    return bool(state["on_demand"] and state["on_demand"]["models"])


def _show(read_lines: Callable[[], list[str]], target: Target, args: argparse.Namespace) -> int:
    """Print the lines once, or again and again with --watch; return the exit code."""

    def read_known() -> list[str]:
        try:
            return read_lines()
        except (LookupError, TypeError, AttributeError) as error:
            reason = f"{target} is not an adapter of this version: {error!r}"
            raise AdapterError(reason) from error

    if args.watch is not None:
        read_again = partial(_read_or_explain, read_known, target, is_view=not args.json)
        return watch(read_again, args.watch, is_view=not args.json)
    try:
        print("\n".join(read_known()))
    except Refused as error:
        return show_failure(error.answer, target, as_json=args.json, hint=_ADMIN_HINT)
    return 0


def _read_or_explain(
    read_lines: Callable[[], list[str]], target: Target, *, is_view: bool
) -> list[str]:
    """Return the lines; a missing answer becomes a line of the view, or of stderr."""
    try:
        return read_lines()
    except Refused as error:
        reason = f"{target} answers {error.answer.status}"
    except AdapterError as error:
        reason = f"no answer: {error}"
    if is_view:
        return [printable(reason)]
    print(printable(f"{PROG}: {reason}"), file=sys.stderr)
    return []


def device_lines(memory: Mapping[str, Any]) -> list[str]:
    """Return a table of the memory of each device, or why there is none."""
    devices = memory["devices"]
    if not devices:
        return [NOT_MEASURED]
    rows = [
        [
            name,
            _format_known(device["used_bytes"]),
            _format_known(device["free_bytes"]),
            _format_known(device["limit_bytes"]),
            _format_known(device.get("unaccounted_bytes")),
        ]
        for name, device in devices.items()
    ]
    title, *lines = columns([_DEVICE_HEAD, *rows], _DEVICE_RIGHT)
    return [coloured(title, BOLD), *lines]


def _format_known(count: int | None) -> str:
    return "-" if count is None else format_size(count)


class ModelTable:
    """Formats the models of one state after another, with the requests a second between them."""

    def __init__(self) -> None:
        self._served: dict[str, int] | None = None
        self._served_at = 0.0

    def lines(self, state: Mapping[str, Any]) -> list[str]:
        """Return the table, and what there is to say about disk, lost models and failures."""
        on_demand = state["on_demand"]
        models = sorted(state["models"], key=lambda model: str(model["model_id"]))
        head, rows = self._rows(models)
        pinned = _pinned_names(on_demand)
        for row in rows:
            row[1] += ", pinned" if row[0] in pinned else ""
        pending = _pending_rows(on_demand, {row[0] for row in rows}, len(head))
        title, *lines = columns([head, *rows, *pending], _RIGHT)
        loaded = [_colour_state(line, model) for line, model in zip(lines, models, strict=False)]
        lines = [*loaded, *lines[len(loaded) :]]
        if not lines and sys.stdout.isatty():
            lines = ["no model is loaded"]
        return [
            coloured(title, BOLD),
            *lines,
            *_disk_lines(on_demand, state.get("events", ())),
            *_lost_lines(state.get("lost", [])),
            *_failure_lines(state["failures"]),
        ]

    def _rows(self, models: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
        """Return the head and a row for each model, with the columns that this state fills."""
        head = list(_HEAD)
        rows = [_row(model) for model in models]
        rates = self._measure_rates(models)
        if rates is not None:
            head.append("REQ/S")
            for row in rows:
                row.append(f"{rates[row[0]]:.0f}")
        if any(model.get("gpu") is not None for model in models):
            head.append("GPU")
            for row, model in zip(rows, models, strict=True):
                row.append("-" if model["gpu"] is None else str(model["gpu"]))
        return head, rows

    def _measure_rates(self, models: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
        """Return the requests a second of each model since the last state; None for the first."""
        before = self._served
        now = time.monotonic()
        seconds = max(now - self._served_at, 0.001)
        self._served = {model["model_id"]: model["served"] for model in models}
        self._served_at = now
        if before is None:
            return None
        return {
            name: max(0, served - before.get(name, 0)) / seconds
            for name, served in self._served.items()
        }


def _pinned_names(on_demand: Mapping[str, Any] | None) -> set[str]:
    models = on_demand["models"] if on_demand else []
    return {model["model_id"] for model in models if model["is_pinned"]}


def _pending_rows(
    on_demand: Mapping[str, Any] | None, listed: set[str], width: int
) -> list[list[str]]:
    """Return a row for each model that calls have asked for and whose load has not begun."""
    models = on_demand["models"] if on_demand else []
    pending = [model for model in models if model["model_id"] not in listed]
    rows = []
    for model in sorted(pending, key=lambda model: str(model["model_id"])):
        state = str(model["state"])
        if state == "FETCHING" and model["percent"] is not None:
            state += f" {model['percent']} %"
        rows.append([model["model_id"], state, *["-"] * (width - 2)])
    return rows


def _disk_lines(
    on_demand: Mapping[str, Any] | None, events: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return lines about the models on disk and about evictions."""
    if on_demand is None:
        return []
    lines = []
    disk = on_demand.get("disk")
    if disk is not None:  # an adapter of an earlier release does not report it
        limit = disk["limit_bytes"]
        room = f"of {format_size(limit)}" if limit else "the disk has no room for any"
        size = f"{format_size(disk['bytes'])} {room}" if limit else room
        lines.append(f"on disk: {disk['models']}, {size}")
    on_disk_only = on_demand["on_disk"]
    if on_disk_only["models"]:
        size = format_size(on_disk_only["bytes"])
        lines.append(f"on disk alone: {on_disk_only['models']}, {size}")
    evictions = on_demand["evictions"]
    if evictions:
        counts = ", ".join(f"{count} ({reason})" for reason, count in sorted(evictions.items()))
        lines.append(f"evicted from memory since the start: {counts}")
    last = next((event for event in events if event.get("evicted") == "room"), None)
    if last is not None:
        lines.append(f"evicted last: {last['model_id']}, {last['reason'] or 'for room'}")
    return ["", *map(printable, lines)] if lines else []


def _row(model: Mapping[str, Any]) -> list[str]:
    """Return the cells of a model that Triton has, is loading or unloading."""
    age = duration(model["state_seconds"])
    is_ready = model["state"] == "READY"
    state = model["state"] if is_ready else f"{model['state']} {age}"
    if model["waits_for"]:
        state += f", {_describe_wait(model)}"
    idle_seconds = model["idle_seconds"]
    is_unknown = _is_size_unknown(model)
    return [
        model["model_id"],
        state,
        "unknown" if is_unknown else format_size(sum(model["bytes"].values())),
        "-" if is_unknown else model["basis"] or "-",
        str(model["in_flight"]),
        "-" if idle_seconds is None else duration(idle_seconds),
        age if is_ready else "-",
    ]


def _describe_wait(model: Mapping[str, Any]) -> str:
    """Describe the wait of a load or unload, with the models that it waits for."""
    text = str(_WAITS.get(model["waits_for"], model["waits_for"]))
    hanging_seconds = model.get("hanging_seconds")
    if hanging_seconds is not None:
        text = f"hanging for {duration(hanging_seconds)}"
    awaited = model.get("awaits") or []  # an adapter of an earlier release does not report it
    if not awaited:
        return text
    names = ", ".join(awaited[:_MAX_AWAITED])
    unnamed_count = len(awaited) - _MAX_AWAITED
    suffix = f" and {unnamed_count} more" if unnamed_count > 0 else ""
    return f"{text} (behind {names}{suffix})"


def _colour_state(line: str, model: Mapping[str, Any]) -> str:
    """Colour the state. Two blanks before it tell it from a name with the same letters."""
    state = str(model["state"])
    before, separator, after = line.rpartition(f"  {state}")
    return f"{before}  {coloured(state, _COLOURS[state])}{after}" if separator else line


def _lost_lines(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for the models that one exit of Triton ended for good."""
    names_by_exit: dict[str, list[str]] = {}
    for model in models:
        time_of_day = datetime.fromisoformat(model["time"]).astimezone().strftime("%H:%M:%S")
        if model["is_given_up"]:
            title = f"given up with Triton at {time_of_day}: {model['reason']}"
        else:
            title = f"lost with Triton at {time_of_day}"
        names_by_exit.setdefault(title, []).append(model["model_id"])
    lines = [
        f"{title}: {', '.join(names)}; load them again" for title, names in names_by_exit.items()
    ]
    return ["", *map(printable, lines)] if lines else []


def _failure_lines(failures: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of the newest failures, without those that later succeeded."""
    now = datetime.now(UTC)
    recent = []
    for failure in failures:
        age_seconds = (now - datetime.fromisoformat(failure["time"])).total_seconds()
        if age_seconds < _MAX_FAILURE_AGE_SECONDS and not failure.get("is_mended"):
            recent.append((age_seconds, failure))
    newest = recent[:_MAX_FAILURES]
    of_memory = [entry for entry in recent if entry[1]["code"] in _MEMORY_CODES]
    if of_memory and of_memory[0] not in newest:
        newest = [*newest[:-1], of_memory[0]]
    if not newest:
        return []
    rows = [
        [
            f"{duration(age_seconds)} ago",
            failure["operation"],
            failure["model_id"],
            f"{failure['code']}: {' '.join(failure['reason'].split())}{_format_count(failure)}",
        ]
        for age_seconds, failure in newest
    ]
    return ["", coloured("the last loads, unloads and fetches that failed:", BOLD), *columns(rows)]


def _format_count(failure: Mapping[str, Any]) -> str:
    count = failure.get("count", 1)
    return f" ({count} times)" if count > 1 else ""


# -- load and unload ----------------------------------------------------------------------------


def _load_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the name of the model")
    text = "folder, file or archive, where the adapter runs: a path or file:///"
    parser.add_argument("source", metavar="SOURCE", help=text)
    parser.add_argument("--model-type", metavar="TYPE", help="onnx, pytorch ...")
    parser.add_argument("--entry", metavar="NAME", help="which of several models answers")
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the adapter's answer")
    add_token(parser)
    add_listeners(parser, "http", "admin")


def _load(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    fields = {
        "model_name": args.name,
        "url": _absolute_source(args.source),
        "model_type": args.model_type,
        "entry": args.entry,
    }
    body = json.dumps({name: value for name, value in fields.items() if value is not None})
    return _operate(args, environ, ("POST", "/models", body.encode()))


def _absolute_source(text: str) -> str:
    """Make a path absolute; the adapter judges all other sources."""
    return text if "://" in text else os.path.abspath(text)  # noqa: PTH100 - keeps links


def _hint_at_missing_path(args: argparse.Namespace, answer: Answer) -> str:
    """Return a hint if a refused path does not exist on this machine: it may be misspelt."""
    is_refused = args.command == "load" and OUTSIDE_ROOTS.encode() in answer.body
    if not is_refused or "://" in args.source:
        return ""
    path = _absolute_source(args.source)
    return "" if os.path.lexists(path) else f"{path} is not on this machine either"


def _unload_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="as `ps` lists it")
    _add_common(parser)


def _unload(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Unload one model after another. A failure does not keep the others loaded."""
    codes = []
    for name in args.names:
        model_args = argparse.Namespace(**{**vars(args), "name": name})
        request = ("DELETE", f"/models/{quote(name, safe='')}", None)
        codes.append(_operate(model_args, environ, request))
    return max(codes)


def _operate(
    args: argparse.Namespace, environ: Mapping[str, str], request: tuple[str, str, bytes | None]
) -> int:
    """Send a load or unload, show its progress on stderr, and return the exit code."""
    target = find_target(args, environ, "http")
    admin = _find_admin(args, environ)
    started_at = time.monotonic()
    title = f"{args.command} {args.name}"
    try:
        send = partial(ask, target, *request, headers=control_headers(args, environ))
        answer = _send_with_progress(title, send, admin, args)
    except KeyboardInterrupt:
        print(printable(f"{title}: goes on in the adapter; `{PROG} ps` shows it"), file=sys.stderr)
        raise
    if not answer.is_ok:
        hint = _hint_at_missing_path(args, answer)
        return show_failure(answer, target, as_json=args.json, hint=hint)
    seconds = time.monotonic() - started_at
    models = _find_model(admin, args.name) if args.command == "load" else None
    for warning in models[0].get("warnings", ()) if models else ():
        print(f"{coloured('warning', YELLOW, sys.stderr)}: {printable(warning)}", file=sys.stderr)
    if args.json:
        print(json.dumps(answer.json()))
        return 0
    size = _describe_size(models[0]) if models else ""
    print(columns([[f"{args.name} is {args.command}ed after {seconds:.1f} s{size}"]])[0])
    return 0


def _describe_size(model: Mapping[str, Any]) -> str:
    if _is_size_unknown(model):
        return "; size unknown"
    return f" and takes {format_size(sum(model['bytes'].values()))} ({model['basis']})"


def _is_size_unknown(model: Mapping[str, Any]) -> bool:
    """Return whether nobody has measured or estimated the size of a loaded model."""
    is_known = model["basis"] in {"measured", "learned"} or sum(model["bytes"].values()) > 0
    return model["state"] == "READY" and not is_known


def _find_admin(args: argparse.Namespace, environ: Mapping[str, str]) -> Target | None:
    """Return the admin listener of the same adapter, which knows the progress, if it is known.

    The settings may be those of another adapter than the one that --url names.
    """
    if args.url is not None and args.admin is None:
        return None
    try:
        return find_target(argparse.Namespace(**{**vars(args), "url": None}), environ, "admin")
    except InvalidSettings:  # raised if the listener is off
        return None


def _send_with_progress(
    title: str,
    send: Callable[[], Answer],
    admin: Target | None,
    args: argparse.Namespace,
) -> Answer:
    """Send the request from a thread, and show the progress until it is answered."""
    outcomes: list[Answer | Unreachable] = []

    def work() -> None:
        try:
            outcomes.append(send())
        except Unreachable as error:
            outcomes.append(error)

    # a daemon thread ends with the command after Ctrl-C; the adapter continues the load
    sending = threading.Thread(target=work, daemon=True)
    sending.start()
    with progress(title) as report:
        sending.join(_POLL_SECONDS)
        while sending.is_alive():
            report(read_progress(admin, args.name, args.command))
            sending.join(_POLL_SECONDS)
    [outcome] = outcomes
    if isinstance(outcome, Unreachable):
        raise outcome
    return outcome


def read_progress(admin: Target | None, name: str, command: str) -> str:
    """Return what the load or unload of a model waits for, or an empty text if it is not known."""
    models = _find_model(admin, name)
    if models == [] and command == "unload":
        return "waiting for its memory to be free"
    if not models or not models[0]["waits_for"]:
        return ""
    return _describe_wait(models[0])


def _find_model(admin: Target | None, name: str) -> list[dict[str, Any]] | None:
    """Return a list with the model of this name, empty if there is none; None without an answer."""
    if admin is None:
        return None
    try:
        return list(read_state(admin, f"?model_id={quote(name, safe='')}")["models"])
    except (Unreachable, Refused, LookupError):
        return None


COMMANDS = {
    "ps": (_ps_options, _ps),
    "load": (_load_options, _load),
    "unload": (_unload_options, _unload),
}

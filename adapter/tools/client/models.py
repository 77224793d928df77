"""The commands that list, load and unload the models of a running adapter."""

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

from adapter.cli.options import add_listeners, add_token, control_headers, positive
from adapter.cli.parser import PROG
from adapter.cli.text import BOLD, GREEN, RED, YELLOW, coloured, columns, duration, printable
from adapter.core.sizing import format_size
from adapter.errors import AdapterError, InvalidSettings
from adapter.tools.client.connection import (
    OUTSIDE_ROOTS,
    Answer,
    Target,
    Unreachable,
    ask,
    show_failure,
    target_of,
)
from adapter.tools.client.live import progress, watch

ADMIN_SECONDS = 10.0
_POLL_SECONDS = 0.25
_MOST_FAILURES = 5
_OLDEST_FAILURE_SECONDS = 600.0  # of those in the table; --json has them all
# The newest of these is listed whatever callers have mistyped since.
_OF_MEMORY = frozenset({"InsufficientMemory", "OutOfMemory", "ModelTooLarge", "NoRoom"})
_ADMIN_HINT = "only the admin listener tells this; --admin or --url say where it is"
_OF_MODELS = ("models", "on_demand", "lost", "failures")
_MOST_AWAITED = 4
_HEAD = ["NAME", "STATE", "SIZE", "BASIS", "IN FLIGHT", "IDLE", "LOADED FOR"]
_RIGHT = frozenset({2, 4, 5, 6, 7})
_COLOURS = {"READY": GREEN, "LOADING": YELLOW, "UNLOADING": YELLOW, "DEAD": RED}
# What a load or unload spends its time on, by `waits_for` of /debug/state.
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


class NotGood(Exception):
    """The adapter has answered with an error."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


def state_of(target: Target, query: str = "") -> dict[str, Any]:
    answer = ask(target, "GET", f"/debug/state{query}", seconds=ADMIN_SECONDS)
    state = answer.json() if answer.is_good else None
    if not isinstance(state, dict):
        raise NotGood(answer)
    return state


# -- ps -----------------------------------------------------------------------------------------


def add_watch(parser: argparse.ArgumentParser) -> None:
    text = (
        "refresh in place, every SECONDS (default: 1), until Ctrl-C or SIGTERM; without a "
        "terminal print one view after another"
    )
    parser.add_argument(
        "-w", "--watch", nargs="?", const=1.0, type=positive, metavar="SECONDS", help=text
    )
    parser.add_argument("--json", action="store_true", help="as JSON, one object a line")


def _ps_options(parser: argparse.ArgumentParser) -> None:
    text = "only these models (default: all)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=text)
    add_watch(parser)
    add_listeners(parser, "admin")


def _ps(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    target, table = target_of(args, environ, "admin"), _Table()

    def look() -> list[str]:
        state = _only(state_of(target), args.names)
        is_known = state["models"] or state.get("lost") or _asked_for(state)
        if args.names and args.watch is None and not is_known:
            raise AdapterError(f"no model {' or '.join(map(repr, args.names))} is loaded")
        if args.json:
            return [json.dumps({name: state[name] for name in _OF_MODELS if name in state})]
        return table.lines(state)

    return shown(look, target, args)


def _only(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Keep what the state has of these models, of all where none is named."""
    if not names:
        return state
    kept = {
        part: [each for each in state.get(part, []) if each["model_id"] in names]
        for part in ("models", "lost", "failures")
    }
    if (on_demand := state["on_demand"]) is not None:
        models = [each for each in on_demand["models"] if each["model_id"] in names]
        kept["on_demand"] = on_demand | {"models": models}
    return state | kept


def _asked_for(state: dict[str, Any]) -> bool:
    """Return whether calls have asked for a model that may not be loaded yet."""
    return bool(state["on_demand"] and state["on_demand"]["models"])


def shown(look: Callable[[], list[str]], target: Target, args: argparse.Namespace) -> int:
    """Print what `look` returns once, or watch it."""

    def look_well() -> list[str]:
        try:
            return look()
        except (LookupError, TypeError, AttributeError) as error:
            said = f"{target} is not an adapter of this version: {error!r}"
            raise AdapterError(said) from error

    if args.watch is not None:
        again = partial(_again, look_well, target, is_view=not args.json)
        return watch(again, args.watch, is_view=not args.json)
    try:
        print("\n".join(look_well()))
    except NotGood as error:
        return show_failure(error.answer, target, as_json=args.json, hint=_ADMIN_HINT)
    return 0


def _again(look: Callable[[], list[str]], target: Target, *, is_view: bool) -> list[str]:
    """Return what `look` does; no answer is but a line of the view, or of stderr."""
    try:
        return look()
    except NotGood as error:
        said = f"{target} answers {error.answer.status}"
    except AdapterError as error:
        said = f"no answer: {error}"
    if is_view:
        return [printable(said)]
    print(printable(f"{PROG}: {said}"), file=sys.stderr)
    return []


class _Table:
    """Formats the models as lines. Requests a second are those since the state that came before."""

    def __init__(self) -> None:
        self._before: dict[str, int] | None = None
        self._at = 0.0

    def lines(self, state: Mapping[str, Any]) -> list[str]:
        models = sorted(state["models"], key=lambda model: str(model["model_id"]))
        rates = self._rates(models)
        head = _HEAD if rates is None else [*_HEAD, "REQ/S"]
        rows = [_row(each) for each in models]
        if rates is not None:
            rows = [
                [*row, f"{rates[m['model_id']]:.0f}"] for row, m in zip(rows, models, strict=True)
            ]
        if any(each.get("gpu") is not None for each in models):
            head = [*head, "GPU"]
            for row, each in zip(rows, models, strict=True):
                row.append("-" if each["gpu"] is None else str(each["gpu"]))
        pinned = _pinned(state["on_demand"])
        for row in rows:
            row[1] += ", pinned" if row[0] in pinned else ""
        coming = _coming(state["on_demand"], {row[0] for row in rows}, len(head))
        title, *lines = columns([head, *rows, *coming], _RIGHT)
        lines, arriving = lines[: len(rows)], lines[len(rows) :]
        lines = [_painted(line, each) for line, each in zip(lines, models, strict=True)]
        lines += arriving
        if not lines and sys.stdout.isatty():
            lines = ["no model is loaded"]
        aside = _aside(state["on_demand"], state.get("events", ()))
        lost = _lost(state.get("lost", []))
        return [coloured(title, BOLD), *lines, *aside, *lost, *_failures(state["failures"])]

    def _rates(self, models: list[dict[str, Any]]) -> dict[str, float] | None:
        now, before, at = time.monotonic(), self._before, self._at
        self._before = {model["model_id"]: model["served"] for model in models}
        self._at = now
        if before is None:
            return None
        seconds = max(now - at, 0.001)
        return {
            name: max(0, served - before.get(name, 0)) / seconds
            for name, served in self._before.items()
        }


def _pinned(on_demand: Mapping[str, Any] | None) -> set[str]:
    models = on_demand["models"] if on_demand else []
    return {each["model_id"] for each in models if each["is_pinned"]}


def _coming(on_demand: Mapping[str, Any] | None, listed: set[str], width: int) -> list[list[str]]:
    """Return rows of so many cells of the models that calls have asked for and that are not being
    loaded yet.
    """
    models = on_demand["models"] if on_demand else []
    found = sorted((m for m in models if m["model_id"] not in listed), key=lambda m: m["model_id"])
    rows = []
    for each in found:
        percent = "" if each["percent"] is None else f" {each['percent']} %"
        state = f"{each['state']}{percent if each['state'] == 'FETCHING' else ''}"
        rows.append([each["model_id"], state, *["-"] * (width - 2)])
    return rows


def _aside(on_demand: Mapping[str, Any] | None, events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines on what is on disk, and what was evicted."""
    if on_demand is None:
        return []
    lines, kept, disk = [], on_demand["on_disk"], on_demand.get("disk")
    if disk is not None:  # an adapter of an earlier release does not tell it
        size, limit = format_size(disk["bytes"]), disk["limit_bytes"]
        of = f"{size} of {format_size(limit)}" if limit else "the disk has no room for any"
        lines.append(f"on disk: {disk['models']}, {of}")
    if kept["models"]:
        lines.append(f"on disk alone: {kept['models']}, {format_size(kept['bytes'])}")
    if evictions := on_demand["evictions"]:
        counts = ", ".join(f"{count} ({why})" for why, count in sorted(evictions.items()))
        lines.append(f"evicted from memory since the start: {counts}")
    if last := next((each for each in events if each.get("evicted") == "room"), None):
        lines.append(f"evicted last: {last['model_id']}, {last['reason'] or 'for room'}")
    return ["", *map(printable, lines)] if lines else []


def _row(model: Mapping[str, Any]) -> list[str]:
    idle, waits, seconds = model["idle_seconds"], model["waits_for"], model["state_seconds"]
    is_ready = model["state"] == "READY"
    state = model["state"] if is_ready else f"{model['state']} {duration(seconds)}"
    is_unknown = _is_size_unknown(model)
    return [
        model["model_id"],
        f"{state}, {_wait(model)}" if waits else state,
        "unknown" if is_unknown else format_size(sum(model["bytes"].values())),
        "-" if is_unknown else model["basis"] or "-",
        str(model["in_flight"]),
        "-" if idle is None else duration(idle),
        duration(seconds) if is_ready else "-",
    ]


def _wait(model: Mapping[str, Any]) -> str:
    """Return what a load or unload waits for, and for which models; an adapter of an earlier
    release does not tell these.
    """
    text = _WAITS.get(model["waits_for"], model["waits_for"])
    if (seconds := model.get("hanging_seconds")) is not None:
        text = f"hanging for {duration(seconds)}"
    awaited = model.get("awaits") or []
    named = ", ".join(awaited[:_MOST_AWAITED])
    more = f" and {len(awaited) - _MOST_AWAITED} more" if len(awaited) > _MOST_AWAITED else ""
    return f"{text} (behind {named}{more})" if awaited else str(text)


def _painted(line: str, model: Mapping[str, Any]) -> str:
    """Colour the state, which no name can be taken for: it stands behind two blanks."""
    state = str(model["state"])
    before, found, after = line.rpartition(f"  {state}")
    return f"{before}  {coloured(state, _COLOURS[state])}{after}" if found else line


def _lost(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for the models of each end of Triton that are not coming back."""
    named: dict[str, list[str]] = {}
    for each in models:
        at = datetime.fromisoformat(each["time"]).astimezone().strftime("%H:%M:%S")
        what, why = ("given up", f": {each['reason']}") if each["is_given_up"] else ("lost", "")
        named.setdefault(f"{what} with Triton at {at}{why}", []).append(each["model_id"])
    lines = [f"{what}: {', '.join(names)}; load them again" for what, names in named.items()]
    return ["", *map(printable, lines)] if lines else []


def _failures(failures: list[dict[str, Any]]) -> list[str]:
    now = datetime.now(UTC)
    aged = [
        ((now - datetime.fromisoformat(each["time"])).total_seconds(), each) for each in failures
    ]
    recent = [
        each for each in aged if each[0] < _OLDEST_FAILURE_SECONDS and not each[1].get("is_mended")
    ]
    listed = recent[:_MOST_FAILURES]
    if lacks := [each for each in recent if each[1]["code"] in _OF_MEMORY][:1]:
        listed = listed if lacks[0] in listed else [*listed[:-1], *lacks]
    rows = [
        [
            f"{duration(seconds)} ago",
            each["operation"],
            each["model_id"],
            f"{each['code']}: {' '.join(each['reason'].split())}{_times(each.get('count', 1))}",
        ]
        for seconds, each in listed
    ]
    if not rows:
        return []
    return ["", coloured("the last loads, unloads and fetches that failed:", BOLD), *columns(rows)]


def _times(count: int) -> str:
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
    asked = {"model_name": args.name, "url": _source(args.source)}
    hints = {"model_type": args.model_type, "entry": args.entry}
    body = json.dumps(asked | {name: hint for name, hint in hints.items() if hint})
    return _operate(args, environ, ("POST", "/models", body.encode()))


def _source(text: str) -> str:
    """Make a path absolute; the adapter judges all other sources."""
    return text if "://" in text else os.path.abspath(text)  # noqa: PTH100 - keeps links


def _missing_here(args: argparse.Namespace, answer: Answer) -> str:
    """Return a hint if a path was refused that does not exist here: it may be misspelt."""
    is_refused = args.command == "load" and OUTSIDE_ROOTS.encode() in answer.body
    if not is_refused or "://" in args.source or os.path.lexists(_source(args.source)):
        return ""
    return f"{_source(args.source)} is not on this machine either"


def _unload_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="as `ps` lists it")
    _add_common(parser)


def _unload(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """One after another; that one of them does not go is no reason to keep the others."""
    codes = []
    for name in args.names:
        of_one = argparse.Namespace(**{**vars(args), "name": name})
        request = ("DELETE", f"/models/{quote(name, safe='')}", None)
        codes.append(_operate(of_one, environ, request))
    return max(codes)


def _operate(
    args: argparse.Namespace, environ: Mapping[str, str], request: tuple[str, str, bytes | None]
) -> int:
    """Send the request, and say on stderr what the adapter does until it answers."""
    target, admin = target_of(args, environ, "http"), _admin(args, environ)
    begun = time.monotonic()
    title = f"{args.command} {args.name}"
    try:
        send = partial(ask, target, *request, headers=control_headers(args, environ))
        answer = _with_progress(title, send, admin, args)
    except KeyboardInterrupt:
        print(printable(f"{title}: goes on in the adapter; `{PROG} ps` shows it"), file=sys.stderr)
        raise
    if not answer.is_good:
        return show_failure(answer, target, as_json=args.json, hint=_missing_here(args, answer))
    seconds = time.monotonic() - begun
    found = _models(admin, args.name) if args.command == "load" else None
    for warning in found[0].get("warnings", ()) if found else ():
        print(f"{coloured('warning', YELLOW, sys.stderr)}: {printable(warning)}", file=sys.stderr)
    if args.json:
        print(json.dumps(answer.json()))
        return 0
    takes = _takes(found[0]) if found else ""
    print(columns([[f"{args.name} is {args.command}ed after {seconds:.1f} s{takes}"]])[0])
    return 0


def _takes(model: Mapping[str, Any]) -> str:
    if _is_size_unknown(model):
        return "; size unknown"
    return f" and takes {format_size(sum(model['bytes'].values()))} ({model['basis']})"


def _is_size_unknown(model: Mapping[str, Any]) -> bool:
    """Return whether nobody has measured or estimated what a loaded model takes."""
    is_known = model["basis"] in {"measured", "learned"} or sum(model["bytes"].values()) > 0
    return model["state"] == "READY" and not is_known


def _admin(args: argparse.Namespace, environ: Mapping[str, str]) -> Target | None:
    """Where progress is asked for. With --url only what --admin says is known to be of the same
    adapter.
    """
    if args.url is not None and args.admin is None:
        return None
    try:
        return target_of(argparse.Namespace(**{**vars(args), "url": None}), environ, "admin")
    except InvalidSettings:  # off, say: then without progress
        return None


def _with_progress(
    title: str,
    send: Callable[[], Answer],
    admin: Target | None,
    args: argparse.Namespace,
) -> Answer:
    found: list[Answer | Unreachable] = []

    def work() -> None:
        try:
            found.append(send())
        except Unreachable as error:
            found.append(error)

    # a daemon: after Ctrl-C nobody waits for it, and the adapter goes on with the load
    sending = threading.Thread(target=work, daemon=True)
    sending.start()
    with progress(title) as tell:
        sending.join(_POLL_SECONDS)
        while sending.is_alive():
            tell(_news(admin, args.name, args.command))
            sending.join(_POLL_SECONDS)
    [answer] = found
    if isinstance(answer, Unreachable):
        raise answer
    return answer


def _news(admin: Target | None, name: str, command: str) -> str:
    """Return what the model's load or unload waits for, an empty text where that is not known."""
    models = _models(admin, name)
    if models == [] and command == "unload":
        return "waiting for its memory to be free"
    waits = models[0]["waits_for"] if models else None
    return _wait(models[0]) if models and waits else ""


def _models(admin: Target | None, name: str) -> list[dict[str, Any]] | None:
    """Return the model of this name, if there is one; None where nobody tells."""
    if admin is None:
        return None
    try:
        return list(state_of(admin, f"?model_id={quote(name, safe='')}")["models"])
    except (Unreachable, NotGood, LookupError):
        return None


COMMANDS = {
    "ps": (_ps_options, _ps),
    "load": (_load_options, _load),
    "unload": (_unload_options, _unload),
}

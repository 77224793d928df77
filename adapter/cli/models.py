"""Lists, loads, unloads and forgets the models of a running adapter: ps, load, unload, forget."""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from adapter.cli.client import (
    FIELD_ERRORS,
    Answer,
    Refused,
    Target,
    Unreachable,
    ask,
    explain_odd_answer,
    find_target,
    read_state,
    show_failure,
    show_progress,
)
from adapter.cli.options import add_listeners, control_headers, parse_seconds
from adapter.cli.parser import PROG
from adapter.cli.text import (
    BOLD,
    GREEN,
    RED,
    YELLOW,
    add_colour,
    can_rewrite,
    escape,
    format_columns,
    format_duration,
)
from adapter.core.byte_sizes import format_size
from adapter.core.memory import NOT_MEASURED
from adapter.errors import AdapterError, InvalidSettings

if TYPE_CHECKING:
    from rich.text import Text

State = Mapping[str, Any]  # parsed JSON of /debug/state

_POLL_SECONDS = 0.25
_MAX_FAILURES = 5
_MAX_FAILURE_AGE_SECONDS = 600.0  # in the table; --json has them all
# The newest of these is always listed, even if other failures are newer.
_MEMORY_CODES = frozenset({"InsufficientMemory", "OutOfMemory", "ModelTooLarge", "NoRoom"})
_MAX_AWAITED = 4
_OUTSIDE_ROOTS = "outside the model roots"  # in the reason of a refused load
# Raised while the admin listener does not say what a model does, or says it as another version.
_NO_NEWS = (Unreachable, Refused, *FIELD_ERRORS)
# Colours of states; all other states pass by themselves.
_COLOURS = {"READY": GREEN, "DEAD": RED, "STUCK": RED}
# Words for the values of `waits_for` in /debug/state.
_WAITS = {
    "fetch": "fetching",
    "triton_start": "waiting for Triton to start",
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


def _add_ps_options(parser: argparse.ArgumentParser) -> None:
    text = "only these models (default: all)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=text)
    text = (
        "refresh in place, every SECONDS (default: 1), until Ctrl-C or SIGTERM; without a "
        "terminal print one view after another"
    )
    parser.add_argument(
        "-w", "--watch", nargs="?", const=1.0, type=parse_seconds, metavar="SECONDS", help=text
    )
    parser.add_argument("--json", action="store_true", help="as JSON, one object a line")
    add_listeners(parser, "admin")


def _ps(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the devices and the models, once or, with --watch, again and again."""
    target = find_target(args, environ, "admin")
    table = ModelTable()

    def read_lines() -> list[str]:
        state = read_state(target)
        with explain_odd_answer(target):
            return _format_state(state, table, args)

    if args.watch is not None:
        return _watch(read_lines, args.watch, is_view=not args.json)
    try:
        print("\n".join(read_lines()))
    except Refused as error:
        return show_failure(error.answer, target, as_json=args.json)
    return 0


def _format_state(state: State, table: "ModelTable", args: argparse.Namespace) -> list[str]:
    """Return the lines of `ps`: JSON, or a table of devices and one of models."""
    if args.names:
        state = _select_models(state, args.names)
        on_demand = state["on_demand"] or {"models": []}
        has_models = state["models"] or state["forgotten"] or on_demand["models"]
        if args.watch is None and not has_models:
            raise AdapterError(f"no model {' or '.join(map(repr, args.names))} is loaded")
    if args.json:
        parts = ("memory", "models", "on_demand", "forgotten", "failures")
        return [json.dumps({part: state[part] for part in parts})]
    return [*format_devices(state["memory"]), "", *table.format(state)]


def _select_models(state: State, names: Sequence[str]) -> State:
    """Return the state of the adapter with only these models in it."""

    def select(entries: Sequence[State]) -> list[State]:
        return [entry for entry in entries if entry["model_id"] in names]

    on_demand = state["on_demand"]
    if on_demand is not None:
        on_demand = {**on_demand, "models": select(on_demand["models"])}
    selected = {part: select(state[part]) for part in ("models", "forgotten", "failures")}
    return {**state, **selected, "on_demand": on_demand}


def _watch(read_lines: Callable[[], list[str]], seconds: float, *, is_view: bool) -> int:
    """Show the lines again and again until Ctrl-C, and return the exit code.

    A view is refreshed in place on a terminal, and followed by an empty line elsewhere. Errors are
    shown in the view, or on stderr.
    """

    def read_again() -> list[str]:
        try:
            return read_lines()
        except Refused as error:
            reason = str(error)
        except AdapterError as error:
            reason = f"no answer: {error}"
        if is_view:
            return [escape(reason)]
        print(escape(f"{PROG}: {reason}"), file=sys.stderr)
        return []

    try:
        if is_view and can_rewrite(sys.stdout):
            _refresh(read_again, seconds)
        while True:
            lines = [*read_again(), ""] if is_view else read_again()
            sys.stdout.writelines(f"{line}\n" for line in lines)
            sys.stdout.flush()
            time.sleep(seconds)
    except KeyboardInterrupt:
        return 0


def _refresh(read_lines: Callable[[], list[str]], seconds: float) -> None:
    """Write each view over the one before, until Ctrl-C."""
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it
    from rich.live import Live  # noqa: PLC0415

    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as view:
        while True:
            view.update(fit_lines(read_lines(), console.height - 1), refresh=True)
            time.sleep(seconds)


def fit_lines(lines: list[str], height: int) -> "Text":
    """Join the lines to a view of this height; the last line says how many more there are."""
    from rich.text import Text  # noqa: PLC0415 - see above

    if len(lines) > height:
        lines = [*lines[: height - 1], f"... {len(lines) - height + 1} more lines"]
    return Text.from_ansi("\n".join(lines), no_wrap=True, overflow="ellipsis")


def format_devices(memory: State) -> list[str]:
    """Return a table of the memory of each device, or why there is none."""
    devices = memory["devices"]
    if not devices:
        return [NOT_MEASURED]
    columns = {
        "USED": "used_bytes",
        "FREE": "free_bytes",
        "RESERVE": "memory_reserve_bytes",
        "LIMIT": "limit_bytes",
        "NOT ATTRIBUTED": "not_attributed_bytes",
    }
    rows = [["DEVICE", *columns]]
    for name, device in devices.items():
        sizes = [device[figure] for figure in columns.values()]
        rows.append([name, *("-" if size is None else format_size(size) for size in sizes)])
    title, *lines = format_columns(rows, frozenset(range(1, len(rows[0]))))
    return [add_colour(title, BOLD), *lines]


class ModelTable:
    """Formats the models of one state after another, with the requests a second between them."""

    def __init__(self) -> None:
        self._served: dict[str, int] | None = None
        self._served_at = 0.0

    def format(self, state: State) -> list[str]:
        """Return a table of the models, and lines about the disk, forgotten models and failures."""
        on_demand = state["on_demand"]
        models = sorted(state["models"], key=lambda model: str(model["model_id"]))
        rates = self._measure_rates(models)
        has_gpu = any(model["gpu"] is not None for model in models)
        head = ["NAME", "STATE", "SIZE", "BASIS", "IN FLIGHT", "IDLE", "LOADED FOR"]
        head += ["REQ/S"] if rates is not None else []
        head += ["GPU"] if has_gpu else []
        rows = []
        percents = _find_percents(on_demand)
        for model in models:
            row = _format_model(model, percents.get(model["model_id"]))
            if rates is not None:
                row.append(f"{rates[model['model_id']]:.0f}")
            if has_gpu:
                row.append("-" if model["gpu"] is None else str(model["gpu"]))
            rows.append(row)
        title, *lines = format_columns([head, *rows], frozenset({2, 4, 5, 6, 7}))
        for index, model in enumerate(models):
            lines[index] = _colour_state(lines[index], str(model["state"]))
        if not lines and sys.stdout.isatty():
            lines = ["no model is loaded"]
        return [
            add_colour(title, BOLD),
            *lines,
            *([] if on_demand is None else _disk_lines(on_demand, state["events"])),
            *_forgotten_lines(state["forgotten"]),
            *_failure_lines(state["failures"]),
        ]

    def _measure_rates(self, models: Sequence[State]) -> dict[str, float] | None:
        """Return the requests a second of each model since the last state; None for the first."""
        before = self._served
        seconds = max(time.monotonic() - self._served_at, 0.001)
        self._served = {model["model_id"]: model["served"] for model in models}
        self._served_at = time.monotonic()
        if before is None:
            return None
        return {
            name: max(0, served - before.get(name, 0)) / seconds
            for name, served in self._served.items()
        }


def _find_percents(on_demand: State | None) -> dict[str, int]:
    """Return how much of each model that is being fetched is here."""
    models = on_demand["models"] if on_demand else []
    return {one["model_id"]: one["percent"] for one in models if one["percent"] is not None}


def _format_model(
    model: State,
    percent: int | None = None,  # of the files
) -> list[str]:
    """Return the cells of a model that is loaded, on its way, or being unloaded."""
    age = format_duration(model["state_seconds"])
    is_ready = model["state"] == "READY"
    state = model["state"] if is_ready else f"{model['state']} {age}"
    if model["waits_for"]:
        state += f", {_describe_wait(model)}"
        state += f" {percent} %" if model["waits_for"] == "fetch" and percent is not None else ""
    if model["is_pinned"]:
        state += ", pinned"
    size = _known_size(model)
    idle_seconds = model["idle_seconds"]
    return [
        model["model_id"],
        state,
        "unknown" if size is None else format_size(size),
        "-" if size is None else model["basis"] or "-",
        str(model["in_flight"]),
        "-" if idle_seconds is None else format_duration(idle_seconds),
        age if is_ready else "-",
    ]


def _known_size(model: State) -> int | None:
    """Return the bytes of a model; None if it is loaded and its size is not known."""
    size = sum(model["bytes"].values())
    is_known = size > 0 or model["basis"] in {"measured", "learned"}
    return None if model["state"] == "READY" and not is_known else size


def _describe_wait(model: State) -> str:
    """Describe the wait of a load or unload, with the models that it waits for."""
    text = str(_WAITS.get(model["waits_for"], model["waits_for"]))
    if model["hanging_seconds"] is not None:
        text = f"hanging for {format_duration(model['hanging_seconds'])}"
    awaited = model["awaits"]
    if not awaited:
        return text
    names = ", ".join(awaited[:_MAX_AWAITED])
    more = f" and {len(awaited) - _MAX_AWAITED} more" if len(awaited) > _MAX_AWAITED else ""
    return f"{text} (behind {names}{more})"


def _colour_state(line: str, state: str) -> str:
    """Colour the state in a line; two blanks before it tell it from a name with its letters."""
    before, separator, after = line.rpartition(f"  {state}")
    coloured = add_colour(state, _COLOURS.get(state, YELLOW))
    return f"{before}  {coloured}{after}" if separator else line


def _disk_lines(on_demand: State, events: Sequence[State]) -> list[str]:
    """Return the lines of `ps` about the models on disk, and the newest eviction for room, if any.

    The events are in the order of the state: the newest first.
    """
    disk = on_demand["disk"]
    size = "the disk has no room for any"
    if disk["limit_bytes"]:
        size = f"{format_size(disk['bytes'])} of {format_size(disk['limit_bytes'])}"
    lines = ["", f"on disk: {disk['models']}, {size}"]
    for event in events:
        if event["evicted"] == "room":
            lines.append(f"evicted last: {event['model_id']}, {event['reason'] or 'for room'}")
            break
    return [escape(line) for line in lines]


def _forgotten_lines(models: Sequence[State]) -> list[str]:
    """Return the lines of `ps` about models that Triton has lost: a line for each moment."""
    names_by_reason: dict[str, list[str]] = {}
    for model in models:
        time_of_day = datetime.fromisoformat(model["time"]).astimezone().strftime("%H:%M:%S")
        what = "given up" if model["is_given_up"] else "lost"
        title = f"{what} at {time_of_day}: {model['reason']}"
        names_by_reason.setdefault(title, []).append(model["model_id"])
    lines = [""] if names_by_reason else []
    for title, names in names_by_reason.items():
        lines.append(escape(f"{title}: {', '.join(names)}"))
    return lines


def _failure_lines(failures: Sequence[State]) -> list[str]:
    """Return the lines of `ps` about the newest failures, except those that succeeded since."""
    now = datetime.now(UTC)
    rows = []
    lack_of_memory = None
    for failure in failures:
        age_seconds = (now - datetime.fromisoformat(failure["time"])).total_seconds()
        if age_seconds >= _MAX_FAILURE_AGE_SECONDS or failure["is_mended"]:
            continue
        count = f"{failure['count']} failures, the last: " if failure["count"] > 1 else ""
        reason = f"{count}{failure['code']}: {' '.join(failure['reason'].split())}"
        age = f"{format_duration(age_seconds)} ago"
        rows.append([age, failure["operation"], failure["model_id"], reason])
        if lack_of_memory is None and failure["code"] in _MEMORY_CODES:
            lack_of_memory = rows[-1]
    if not rows:
        return []
    newest = rows[:_MAX_FAILURES]
    if lack_of_memory is not None and lack_of_memory not in newest:
        newest[-1] = lack_of_memory
    title = add_colour("the last loads, unloads and fetches that failed:", BOLD)
    return ["", title, *format_columns(newest)]


# -- load and unload ----------------------------------------------------------------------------


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the name of the model")
    text = "folder, file or archive, where the adapter runs: a path or file:///"
    parser.add_argument("source", metavar="SOURCE", help=text)
    parser.add_argument("--model-type", metavar="TYPE", help="onnx, pytorch ...")
    parser.add_argument("--entry", metavar="NAME", help="which of several models answers")
    _add_common_options(parser)


def _add_unload_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="as `ps` lists it")
    _add_common_options(parser)


def _add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the adapter's answer")
    add_listeners(parser, "http", "admin")


def _load(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Load a model, and print its size and the warnings of its package."""
    source = args.source
    is_path = "://" not in source
    if is_path:
        source = os.path.abspath(source)  # noqa: PTH100 - keeps links
    fields = {
        "model_name": args.name,
        "url": source,
        "model_type": args.model_type,
        "entry": args.entry,
    }
    body = json.dumps({name: value for name, value in fields.items() if value is not None})
    operation = _Operation(args, environ, args.name)
    answer = operation.send("POST", "/models", body.encode())
    if not answer.is_ok:
        hint = ""
        if is_path and _OUTSIDE_ROOTS in answer.reason() and not os.path.lexists(source):
            hint = f"{source} is not on this machine either"
        return operation.show_failure(answer, hint)
    suffix = ""
    with suppress(*_NO_NEWS):
        suffix = _report_loaded(operation.admin, args.name)
    return operation.show_success(answer, suffix)


def _report_loaded(admin: Target | None, name: str) -> str:
    """Print the warnings of a loaded package, and return its size as the end of a sentence.

    Raises one of _NO_NEWS.
    """
    model = _read_model(admin, name)
    size = _known_size(model)
    for warning in model["warnings"]:
        title = add_colour("warning", YELLOW, sys.stderr)
        print(f"{title}: {escape(warning)}", file=sys.stderr)
    if size is None:
        return "; size unknown"
    return f" and takes {format_size(size)} ({model['basis']})"


def _unload(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Unload one model after another, also after a failure."""
    code = 0
    for name in args.names:
        operation = _Operation(args, environ, name)
        answer = operation.send("DELETE", f"/models/{quote(name, safe='')}")
        if answer.is_ok:
            operation.show_success(answer)
        else:
            code = operation.show_failure(answer)
    return code


# -- forget -------------------------------------------------------------------------------------


def _add_forget_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the name of the model, loaded or not")
    parser.add_argument("--json", action="store_true", help="print the adapter's answer")
    add_listeners(parser, "admin")


def _forget(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Have the adapter forget what was learned of a model, and print what that was."""
    target = find_target(args, environ, "admin")
    path = f"/forget?model_id={quote(args.name, safe='')}"
    answer = ask(target, "POST", path, headers=control_headers(args, environ))
    if not answer.is_ok:
        return show_failure(answer, target, as_json=args.json)
    forgotten = answer.json()
    with explain_odd_answer(target):
        text = f"{args.name}: forgot {_describe_forgotten(forgotten)}"
    print(json.dumps(forgotten) if args.json else escape(text))
    return 0


def _describe_forgotten(forgotten: State) -> str:
    """Describe what was known of a package."""
    facts = []
    if forgotten["bytes"] is not None:
        size = format_size(sum(forgotten["bytes"].values()))
        facts.append(f"that it took {size}" + (" (measured)" if forgotten["is_measured"] else ""))
    if forgotten["needs_more_than_bytes"] is not None:
        size = format_size(max(forgotten["needs_more_than_bytes"].values()))
        facts.append(f"that it needs more than {size}")
    if forgotten["was_too_large"]:
        facts.append("that it can never fit")
    return " and ".join(facts) or "nothing: no load of it has shown anything"


# -- what load and unload have in common --------------------------------------------------------


class _Operation:
    """Sends the load or unload of one model, and shows its progress and its outcome."""

    def __init__(self, args: argparse.Namespace, environ: Mapping[str, str], name: str) -> None:
        self._command = args.command
        self._name = name
        self._as_json = args.json
        self._headers = control_headers(args, environ)
        self._target = find_target(args, environ, "http")
        self._started_at = time.monotonic()
        self.admin = _find_admin(args, environ)

    def send(self, method: str, path: str, body: bytes | None = None) -> Answer:
        """Send the request, and show the progress until it is answered. Raises Unreachable."""
        answered: Future[Answer] = Future()

        def ask_adapter() -> None:
            try:
                answered.set_result(ask(self._target, method, path, body, headers=self._headers))
            except Exception as error:  # noqa: BLE001 - raised below, where the answer is awaited
                answered.set_exception(error)

        # a daemon thread ends with the command after Ctrl-C; the adapter continues the load
        threading.Thread(target=ask_adapter, daemon=True).start()
        title = f"{self._command} {self._name}"
        try:
            with show_progress(title) as show_step:
                while True:
                    try:
                        return answered.result(_POLL_SECONDS)
                    except TimeoutError:
                        show_step(describe_step(self.admin, self._name, self._command))
        except KeyboardInterrupt:
            text = f"{title}: goes on in the adapter; `{PROG} ps` shows it"
            print(escape(text), file=sys.stderr)
            raise

    def show_success(self, answer: Answer, suffix: str = "") -> int:
        """Print the adapter's answer as JSON, or one line, and return 0 for the exit code."""
        seconds = time.monotonic() - self._started_at
        text = f"{self._name} is {self._command}ed after {seconds:.1f} s{suffix}"
        print(json.dumps(answer.json()) if self._as_json else format_columns([[text]])[0])
        return 0

    def show_failure(self, answer: Answer, hint: str = "") -> int:
        """Show why the adapter refused: in words on stderr, or as its JSON on stdout with --json.

        Return 1 for the exit code.
        """
        return show_failure(answer, self._target, as_json=self._as_json, hint=hint)


def _find_admin(args: argparse.Namespace, environ: Mapping[str, str]) -> Target | None:
    """Return the admin listener of the same adapter, which knows the progress; None if unknown.

    The settings may be those of another adapter than the one that --url names.
    """
    if args.url is not None and args.admin is None:
        return None
    try:
        return find_target(argparse.Namespace(**{**vars(args), "url": None}), environ, "admin")
    except InvalidSettings:  # raised if the listener is off
        return None


def describe_step(admin: Target | None, name: str, command: str) -> str:
    """Return what the load or unload of a model waits for, or an empty text if it is not known."""
    try:
        model = _read_model(admin, name)
        if not model and command == "unload":
            return "waiting for its memory to be free"
        return _describe_wait(model) if model.get("waits_for") else ""
    except _NO_NEWS:
        return ""


def _read_model(admin: Target | None, name: str) -> State:
    """Return the state of a model, empty if there is no such model. Raises one of _NO_NEWS."""
    if admin is None:
        raise LookupError("no admin listener is known")
    models = read_state(admin, f"?model_id={quote(name, safe='')}")["models"]
    return models[0] if models else {}


COMMANDS = {
    "ps": (_add_ps_options, _ps),
    "load": (_add_load_options, _load),
    "unload": (_add_unload_options, _unload),
    "forget": (_add_forget_options, _forget),
}

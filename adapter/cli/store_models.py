"""Lists the models of the stores of a running adapter, and shows all about one: list and show."""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from adapter.cli.client import (
    Refused,
    Target,
    Unreachable,
    ask,
    explain_odd_answer,
    find_target,
    show_failure,
)
from adapter.cli.options import add_listeners
from adapter.cli.parser import PROG
from adapter.cli.text import BOLD, add_colour, escape, format_columns, format_duration
from adapter.core.byte_sizes import format_size
from adapter.errors import AdapterError, InvalidSettings

_SECONDS = 60.0  # for one page: a store may be slow
_LIMIT = 100
_MAX_PAGE = 1000
_PLACES = {"memory": "in memory", "disk": "on disk", "store": "in the store"}
_NUMBERS = {"BOOL": True, "BYTES": ""}  # a value of each data type; 0 for all others
_MAX_ELEMENTS = 16  # of an input whose data the example writes out

Model = Mapping[str, Any]


def _add_list_options(parser: argparse.ArgumentParser) -> None:
    text = "only names with this text, or that match this glob, as in 'team-a/*' (default: all)"
    parser.add_argument("filter", nargs="?", default="", metavar="FILTER", help=text)
    text = "only this store: the name of an endpoint, or '' for model_store (default: all)"
    parser.add_argument("--store", metavar="NAME", help=text)
    amount = parser.add_mutually_exclusive_group()
    text = f"so many models at most (default: {_LIMIT})"
    amount.add_argument("--limit", type=_parse_count, default=_LIMIT, metavar="N", help=text)
    amount.add_argument("--all", action="store_true", help="all models, however many there are")
    text = "begin behind a model: what the end of another list says"
    parser.add_argument("--after", default="", metavar="PLACE", help=text)
    parser.add_argument("--json", action="store_true", help="as JSON, one model a line")
    add_listeners(parser, "admin")


def _parse_count(text: str) -> int:
    """Parse a number of models. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return int(text)


def _list(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the models of the stores, one page after the other."""
    target = find_target(args, environ, "admin")
    try:
        with explain_odd_answer(target):
            return _print_pages(target, args)
    except Refused as error:
        return show_failure(error.answer, target, as_json=args.json)


def _print_pages(target: Target, args: argparse.Namespace) -> int:
    """Print pages until there are as many models as are asked for. Raises Refused."""
    query = {"filter": args.filter}
    if args.after:
        query["after"] = args.after
    if args.store is not None:
        query["store"] = args.store
    remaining = sys.maxsize if args.all else args.limit
    notes: list[str] = []
    is_first = True
    after = args.after
    while remaining > 0:
        query["limit"] = str(min(remaining, _MAX_PAGE))
        page = _read(target, query)
        notes += [note for note in page["notes"] if note not in notes]
        if page["models"]:
            _print_models(page["models"], as_json=args.json, has_title=is_first)
            is_first = False
        remaining -= len(page["models"])
        after = page["after"] or ""
        if not after:
            break
        if after == query.get("after"):
            raise AdapterError(f"{target} answers with the same page again")
        query["after"] = after
    _print_end(notes, after, is_empty=is_first)
    return 0


def _read(target: Target, query: Mapping[str, str]) -> dict[str, Any]:
    """Return an answer of /store/models. Raises Refused, Unreachable and AdapterError."""
    path = f"/store/models?{urlencode(query)}"
    answer = ask(target, "GET", path, timeout_seconds=_SECONDS)
    if not answer.is_ok:
        raise Refused(target, answer)
    page = answer.json()
    if not isinstance(page, dict):
        raise AdapterError(f"{target} is not an adapter of this version")
    return page


def _print_models(models: list[Model], *, as_json: bool, has_title: bool) -> None:
    if as_json:
        for model in models:
            print(json.dumps(model))
        return
    title = ["NAME", "WHERE", "PACKAGE", "DISK", "MEMORY", "LAST USE", ""]
    rows = [title, *map(_format_row, models)]
    first, *lines = format_columns(rows, frozenset({2, 3, 4, 5}))
    if has_title:
        print(add_colour(first, BOLD))
    for line in lines:
        print(line)


def _format_row(model: Model) -> list[str]:
    return [
        model["name"],
        _describe_place(model),
        *(_format_bytes(model[name]) for name in ("package_bytes", "disk_bytes", "memory_bytes")),
        _format_age(model["last_used"]),
        "; ".join(_list_remarks(_shorten_reason(model))),
    ]


def _shorten_reason(model: Model) -> Model:
    """Return a model whose reason is the line of a traceback that names the error."""
    reason = model["reason"]
    if reason is None or "\n" not in reason.strip():
        return model
    # Triton puts the frames of Python behind the error, Python itself before it
    message = reason.partition("\n\nAt:")[0].strip()
    *_, line = message.splitlines()
    return {**model, "reason": f"{line.strip()} (`{PROG} show {model['name']}` has all of it)"}


def _describe_place(model: Model) -> str:
    """Return where the model is, and its state if it is not simply ready."""
    place = _PLACES[model["where"]]
    is_moving = model["state"] not in {None, "READY"}
    return f"{place}, {model['state']}" if is_moving else place


def _list_remarks(model: Model) -> list[str]:
    remarks = ["pinned"] if model["is_pinned"] else []
    if model["is_outdated"]:
        remarks.append("the store no longer has this version")
    if model["reason"]:
        what = "given up" if model["is_given_up"] else "failed"
        remarks.append(f"{what}: {' '.join(model['reason'].split())}")
    return remarks


def _format_bytes(size: int | None) -> str:
    return "-" if size is None else format_size(size)


def _format_age(time: str | None) -> str:
    if time is None:
        return "-"
    seconds = (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()
    return f"{format_duration(max(0.0, seconds))} ago"


def _print_end(notes: list[str], after: str, *, is_empty: bool) -> None:
    """Print what the list lacks on stderr: stdout may be for a program."""
    lines = [f"only what is on disk or in memory is listed: {note}" for note in notes]
    if after:
        more = f"there are more: --all, a FILTER, or --after={shlex.quote(after)}"
        lines.append(more)
    elif is_empty:
        lines.append("no store has such a model")
    for line in lines:
        print(escape(line), file=sys.stderr)


# -- show ---------------------------------------------------------------------------------------


def _add_show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="as `list` or `ps` has it")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_listeners(parser, "admin", "http")


def _show(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print all that is known of one model, and how to call it."""
    target = find_target(args, environ, "admin")
    try:
        model = _read(target, {"name": args.name})
    except Refused as error:
        return show_failure(error.answer, target, as_json=args.json)
    with explain_odd_answer(target):
        _print_model(_find_http(args, environ), model, as_json=args.json)
    return 0


def _print_model(http: Target | None, model: Model, *, as_json: bool) -> None:
    metadata = _ask_about_model(http, model)
    config = _ask_about_model(http, model, "/config") or {}
    is_decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
    example = _format_call(http, model, metadata, is_decoupled=is_decoupled)
    if as_json:
        print(json.dumps({**model, "metadata": metadata, "example": example}))
        return
    rows = [*_list_facts(model), *_list_tensors(metadata)]
    for line in format_columns([row for row in rows if row[1]]):
        print(line)
    print(f"\n{escape(example)}")


def _find_http(args: argparse.Namespace, environ: Mapping[str, str]) -> Target | None:
    """Return the listener that takes calls; None if only --url is known, or it is off."""
    if args.url is not None and args.http is None:
        return None
    try:
        return find_target(argparse.Namespace(**{**vars(args), "url": None}), environ, "http")
    except InvalidSettings:
        return None


def _ask_about_model(
    http: Target | None, model: Model, below_model: str = ""
) -> dict[str, Any] | None:
    """Return V2's metadata of a loaded model, or what else V2 has below its name; None where it
    cannot be read.
    """
    if http is None or model["state"] != "READY":
        return None
    path = f"/v2/models/{quote(model['loaded_as'][0], safe='')}{below_model}"
    try:
        answer = ask(http, "GET", path, timeout_seconds=_SECONDS)
    except Unreachable:
        return None
    facts = answer.json() if answer.is_ok else None
    return facts if isinstance(facts, dict) else None


def _list_facts(model: Model) -> list[list[str]]:
    """Return a row for each fact; the second cell is empty for what is not known."""
    size = model["size"]
    held = ", ".join(f"{format_size(count)} on {device}" for device, count in _items(size["bytes"]))
    measured = size["measured_bytes"]
    declared = size["declared_bytes"]
    return [
        ["name", model["name"]],
        ["where", _describe_place(model)],
        ["remarks", "; ".join(_list_remarks(model))],
        ["loaded as", ", ".join(model["loaded_as"])],
        ["version", model["etag"] or ""],
        ["modified", model["modified"] or ""],
        ["package", "" if model["package_bytes"] is None else format_size(model["package_bytes"])],
        ["on disk", "" if model["disk_bytes"] is None else format_size(model["disk_bytes"])],
        ["memory", f"{held} ({size['basis']})" if held else ""],
        ["declared", "" if declared is None else format_size(declared)],
        ["measured", "" if measured is None else format_size(measured)],
        ["last use", "" if model["last_used"] is None else _format_age(model["last_used"])],
    ]


def _items(sizes: Mapping[str, int] | None) -> list[tuple[str, int]]:
    return [*sizes.items()] if sizes else []


def _list_tensors(metadata: Model | None) -> list[list[str]]:
    if metadata is None:
        return []
    return [
        [kind, f"{tensor['name']} {tensor['datatype']} {tensor['shape']}"]
        for kind in ("inputs", "outputs")
        for tensor in metadata.get(kind, [])
    ]


def _format_call(
    http: Target | None, model: Model, metadata: Model | None, *, is_decoupled: bool
) -> str:
    """Return a line for a shell that calls the model."""
    call = model["call"]
    where = ["http://HOST:8080"]
    if http is not None:
        where = [str(http)]
        if http.socket_path:
            where = ["--unix-socket", http.socket_path, "http://localhost"]
    *options, base = where
    if call["operation"] == "infer":
        operation = "generate_stream" if is_decoupled else "infer"
        url = f"{base}/v2/models/{quote(call['model'], safe='')}/{operation}"
    else:
        operation = "invocations-response-stream" if is_decoupled else "invocations"
        url = f"{base}/endpoints/{call['endpoint']}/{operation}"
        options += ["-H", f"X-Amzn-SageMaker-Target-Model: {call['model']}"]
    body = _make_body(metadata, is_generate=operation == "generate_stream")
    words = ["curl", *options, url, "--data", "@REQUEST.json" if body is None else body]
    return " ".join(map(shlex.quote, words))


def _make_body(metadata: Model | None, *, is_generate: bool) -> str | None:
    """Return a request of zeros, for infer or as generate takes it; None if inputs are not known,
    or are large.
    """
    if metadata is None:
        return None
    inputs = []
    for tensor in metadata.get("inputs", []):
        shape = [max(1, size) for size in tensor["shape"]]
        count = 1
        for size in shape:
            count *= size
        if count > _MAX_ELEMENTS:
            return None
        data = [_NUMBERS.get(tensor["datatype"], 0)] * count
        fields = {"name": tensor["name"], "shape": shape, "datatype": tensor["datatype"]}
        inputs.append({**fields, "data": data})
    if is_generate:
        return json.dumps({field["name"]: field["data"] for field in inputs})
    return json.dumps({"inputs": inputs})


COMMANDS = {
    "list": (_add_list_options, _list),
    "show": (_add_show_options, _show),
}

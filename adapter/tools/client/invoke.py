"""Invoke a model, and print the tensors of its answer."""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from adapter.cli.options import add_listeners, add_token, control_headers
from adapter.cli.parser import PROG
from adapter.cli.text import printable, width
from adapter.errors import AdapterError, InvalidSettings
from adapter.protocols.tensors import flat, unpacked
from adapter.tools.client.connection import Answer, ask, show_failure, target_of

_MOST_ROWS = 20


@dataclass(frozen=True, slots=True)
class Tensor:
    """One output of an answer; `raw` is None if its values came as JSON."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: list[Any]
    raw: bytes | None


def tensors_of(answer: Mapping[str, Any], binary: bytes) -> list[Tensor]:
    """Return the outputs of an answer. `binary` is what follows its JSON.

    Raises ValueError where they are not as V2 has them.
    """
    found, at = [], 0
    for output in answer.get("outputs", []):
        size = output.get("parameters", {}).get("binary_data_size")
        raw = None if size is None else binary[at : at + size]
        at += size or 0
        if raw is None:
            values = flat(output["data"])
        else:
            values = [*chain.from_iterable(unpacked(output["datatype"], raw))]
        found.append(Tensor(output["name"], output["datatype"], (*output["shape"],), values, raw))
    return found


def as_text(tensor: Tensor, width: int) -> Iterator[str]:
    """Return a line for name and shape, and one for each row, cut to the width."""
    shape = ", ".join(map(str, tensor.shape))
    yield printable(f"{tensor.name}  {tensor.datatype} [{shape}]")
    step = max(1, tensor.shape[-1] if tensor.shape else 1)
    starts = range(0, len(tensor.values), step)
    for start in starts[:_MOST_ROWS]:
        yield _row(tensor.values[start : start + step], width)
    if len(starts) > _MOST_ROWS:
        yield f"  ... {len(starts) - _MOST_ROWS} more rows"


def _row(values: list[Any], width: int) -> str:
    line = " "
    for value in values:
        text = _value(value)
        if len(line) + len(text) + 2 > width:
            return f"{line} …"
        line = f"{line} {text}"
    return line


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return printable(json.dumps(value, ensure_ascii=False))


_NOT_LOADED = (
    f"`{PROG} ps` lists what is loaded, `{PROG} load NAME SOURCE` loads it; a model of model_store "
    "is called by its name where on_demand is on, else at POST /endpoints/ENDPOINT/invocations"
)
# how SageMaker's contract and V2 say where raw tensors begin behind the JSON
_JSON_SIZE = re.compile(r"json-header-size=(\d+)")
_JSON_SIZE_OF_V2 = "Inference-Header-Content-Length"


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="as `ps` lists it")
    text = "a V2 inference request in JSON (default, or -: stdin)"
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help=text)
    text = "ask for this output only, and print its values as JSON, or as raw bytes"
    parser.add_argument("--output", metavar="NAME", help=text)
    text = "print the answer as JSON, raw tensors too (default on a terminal: formatted)"
    parser.add_argument("--json", action="store_true", help=text)
    add_token(parser)
    add_listeners(parser, "http")


def _run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    target = target_of(args, environ, "http")
    body = _request(args.file)
    if args.output is not None:
        body = _for_output(body, args.output)
    # an inference wants the token where the endpoint has keys
    headers = {"Content-Type": "application/json", **control_headers(args, environ)}
    name = quote(args.name, safe="")
    answer = ask(target, "POST", f"/models/{name}/invoke", body, headers=headers)
    if _is_not_there(answer):  # V2 loads a model of a store, with on_demand
        answer = ask(target, "POST", f"/v2/models/{name}/infer", body, headers=headers)
    if not answer.is_good:
        hint = _NOT_LOADED if _is_not_there(answer) else ""
        return show_failure(answer, target, as_json=args.json, hint=hint)
    if args.json or args.output is not None or sys.stdout.isatty():
        _show(answer, args)
    else:
        _write(answer.body)
        if _json_size(answer) == len(answer.body) and not answer.body.endswith(b"\n"):
            _write(b"\n")
    return 0


def _is_not_there(answer: Answer) -> bool:
    return not answer.is_good and b"ModelNotFound" in answer.body


def _request(file: str) -> bytes:
    if file != "-":
        try:
            return Path(file).read_bytes()
        except OSError as error:
            raise InvalidSettings([f"FILE {file!r}: {error.strerror}"]) from error
    if sys.stdin.isatty():
        print(f"{PROG}: reading the request from the terminal; Ctrl-D ends it", file=sys.stderr)
    return sys.stdin.buffer.read()


def _for_output(body: bytes, name: str) -> bytes:
    """Have the request ask for one output alone, with the parameters that it gives it."""
    try:
        request = json.loads(body)
        asked = [each for each in request.get("outputs", []) if each["name"] == name]
    except (ValueError, AttributeError, LookupError, TypeError) as error:
        raise InvalidSettings([f"flag --output: the request is not V2 JSON: {error}"]) from error
    return json.dumps(request | {"outputs": asked or [{"name": name}]}).encode()


def _show(answer: Answer, args: argparse.Namespace) -> None:
    head, tensors = _parsed(answer)
    if args.output is not None:
        tensors = [tensor for tensor in tensors if tensor.name == args.output]
    if args.json:
        outputs = [_plain(tensor) for tensor in tensors]
        print(json.dumps(head | {"outputs": outputs} if args.output is None else outputs[0]))
    elif sys.stdout.isatty():
        for tensor in tensors:
            print("\n".join(as_text(tensor, width() or 80)))
    else:
        _write_values(tensors[0])


def _write_values(tensor: Tensor) -> None:
    if tensor.raw is not None:
        _write(tensor.raw)
    else:
        print(json.dumps(tensor.values))


def _plain(tensor: Tensor) -> dict[str, Any]:
    shape = [*tensor.shape]
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "data": tensor.values}


def _json_size(answer: Answer) -> int:
    found = _JSON_SIZE.search(answer.headers.get("Content-Type", ""))
    size = answer.headers.get(_JSON_SIZE_OF_V2) if found is None else found[1]
    return len(answer.body) if size is None else int(size)


def _parsed(answer: Answer) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the JSON of the answer, and its outputs."""
    size = _json_size(answer)
    try:
        head = json.loads(answer.body[:size])
        return head, tensors_of(head, answer.body[size:])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        said = printable(answer.body[:200].decode(errors="replace"))
        raise AdapterError(f"the answer is not one of V2 ({error}): {said}") from error


def _write(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


COMMANDS = {"invoke": (_add_options, _run)}

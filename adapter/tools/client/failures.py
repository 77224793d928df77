"""Shows an error answer: the reason, the figures, and what can be done."""

import json
import sys
from typing import Any

from adapter.cli.options import TOKEN_HINT
from adapter.cli.parser import PROG
from adapter.cli.text import RED, coloured, columns, printable
from adapter.core.sizing import format_size
from adapter.tools.client.connection import Answer, Target, Unreachable, ask

_NO_ROOM = f"unload a model that is not needed (`{PROG} ps`, `{PROG} unload NAME`); try again"
_LATER = "try again in a while"
# By the `code` of the answer; docs/errors.md has them all.
_HINTS = {
    "AlreadyLoaded": f"`{PROG} ps` shows it; unload it first to load other files by this name",
    "BackendTimeout": f"`{PROG} ps` shows what it is doing; the adapter's log may say more",
    "BackendUnavailable": f"`{PROG} healthcheck` says why the adapter is not ready",
    "InsufficientMemory": _NO_ROOM,
    "InvalidModel": f"`{PROG} inspect PATH` looks at a package without a load",
    "ModelNotFound": f"`{PROG} ps` lists what is loaded, `{PROG} load NAME SOURCE` loads it",
    "ModelNotReady": _LATER,
    "ModelTooLarge": f"unloading others does not help; `{PROG} memory` shows the limit",
    "OutOfMemory": _NO_ROOM,
    "Overloaded": _LATER,
    "SourceMissing": "the path is looked up where the adapter runs",
    "TooManyAbandoned": _LATER,
    "TooManyConnections": _LATER,
    "Unauthenticated": TOKEN_HINT,
}
OUTSIDE_ROOTS = "outside the model roots"
# By words of the reason, where the code alone does not say it.
_HINTS_BY_WORDS = {
    "models are for signed calls of the endpoint": (
        f"{TOKEN_HINT}; where the adapter has none, a unix socket or a signed call is the way"
    ),
    "Triton itself lacks this backend": (
        "Triton's log tells where it looked; nothing need be wrong with the package"
    ),
    'name it as "entry"': f"`{PROG} load NAME SOURCE --entry=MODEL` names it",
}
_ADMIN_SECONDS = 2.0
_MOST_BYTES = 300  # of an answer that is not an adapter's, such as a page of HTML
_FIGURES = ("needed_bytes", "free_bytes", "limit_bytes", "device", "matched")


def show_failure(answer: Answer, target: Target, *, as_json: bool, hint: str = "") -> int:
    """Write the answer as it came to stdout, or in words to stderr; return the exit code.

    Of what is no JSON, as no adapter answers, the words are made JSON.
    """
    body = answer.json()
    if as_json and body is not None:
        print(json.dumps(body, indent=2))
        return 1
    if as_json:
        said = {
            "error": f"{answer.status}: {_beginning(answer)}",
            "hint": hint or _stranger(target),
        }
        print(json.dumps(said), file=sys.stderr)
        return 1
    for line in _lines(answer, body if isinstance(body, dict) else {}, target, hint):
        print(line, file=sys.stderr)
    return 1


def _lines(answer: Answer, body: dict[str, Any], target: Target, hint: str) -> list[str]:
    said = body.get("error") or body.get("reason") or _beginning(answer)
    code = str(body.get("code") or "")
    head = printable(f"{PROG}: {answer.status} {code}".rstrip())
    head = coloured(head, RED, sys.stderr)
    lines = [f"{head}: {_several(str(said).strip() or 'no reason given')}"]
    if "needed_bytes" in body:
        lines += columns([_figure(n, body[n]) for n in _FIGURES if body.get(n) is not None])
    by_words = [each for words, each in _HINTS_BY_WORDS.items() if words in str(said)]
    if hint := hint or next(iter(by_words), _HINTS.get(code, "")):
        lines += [printable(f"  {hint}")]
    elif not code:
        lines += [printable(f"  {_stranger(target)}")]
    return lines


def _beginning(answer: Answer) -> str:
    return answer.body[:_MOST_BYTES].decode(errors="replace").strip()


def _stranger(target: Target) -> str:
    """Say who gave an answer that the wanted listener never gives."""
    if target.listener != "admin" and _is_admin(target):
        flags = f"--{target.listener} or --url say where `{target.listener}` is"
        return f"{target} is an adapter's admin listener; {flags}"
    return f"this answer is not from an adapter's listener; asked was {target}"


def _is_admin(target: Target) -> bool:
    try:
        state = ask(target, "GET", "/debug/state", seconds=_ADMIN_SECONDS).json()
    except Unreachable:
        return False
    return isinstance(state, dict) and "models" in state and "failures" in state


def _several(text: str) -> str:
    """Texts of Triton have several lines, which a terminal may show as such."""
    return "\n  ".join(printable(line) for line in text.splitlines())


def _figure(name: str, value: object) -> list[str]:
    title = f"  {name.removesuffix('_bytes')}"
    if isinstance(value, int):
        return [title, f"{format_size(value)} ({value})"]
    return [title, str(value)]

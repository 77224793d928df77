"""The commands for the admin listener alone: wait, healthcheck and drain."""

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus

from adapter.cli.options import (
    TOKEN_HINT,
    add_listeners,
    add_token,
    control_headers,
    load,
    positive,
)
from adapter.cli.parser import PROG
from adapter.cli.text import printable, printable_lines
from adapter.tools.client.connection import Answer, Target, Unreachable, ask, target_of

_PROBE_SECONDS = 2.0  # what SageMaker allows for /ping
_POLL_SECONDS = 0.1
_TELL_SECONDS = 5.0  # from one line on stderr to the next
_WAIT_SECONDS = 120.0
# what a listener says that does not know the path: waiting does not help
_NEVER = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED})


def why_not_ok(
    target: Target,
    limit_seconds: float,
    method: str = "GET",
    path: str = "",
    headers: Mapping[str, str] | None = None,
) -> tuple[str, int | None]:
    """Return an empty text if the answer is 200, else the answer or the reason for none; and the
    status, None without an answer. The path is that of `target`, or /readyz, unless it is given.
    """
    path = path or target.path or "/readyz"
    asked = f"{replace(target, path='')}{'' if target.socket_path else path.partition('?')[0]}"
    try:
        answer = ask(replace(target, path=""), method, path, seconds=limit_seconds, headers=headers)
    except Unreachable as error:
        return f"{error}\n  {error.hint}", None
    if answer.is_good:
        return "", answer.status
    return f"{asked}: {answer.status} {_said(answer)}", answer.status


def _said(answer: Answer) -> str:
    """Return the reason that the body gives, without the JSON around it."""
    body = answer.json()
    reason = (body.get("error") or body.get("reason")) if isinstance(body, dict) else None
    return printable(str(reason or answer.body.decode(errors="replace").strip()))


def _wait_options(parser: argparse.ArgumentParser) -> None:
    text = f"give up after this time (default: {_WAIT_SECONDS:g})"
    parser.add_argument(
        "--timeout", type=positive, default=_WAIT_SECONDS, metavar="SECONDS", help=text
    )
    add_listeners(parser, "admin", "metrics", path="/readyz")


def _wait(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    target, begun = _probes(args, environ), time.monotonic()
    end, tell_at = begun + args.timeout, begun + _TELL_SECONDS
    while True:
        left = end - time.monotonic()
        reason, status = why_not_ok(target, max(0.1, min(_PROBE_SECONDS, left)))
        if not reason:
            return 0
        if status in _NEVER:
            return _failed(
                f"{reason}\n  name the listener with the probes by --admin, --metrics or --url"
            )
        now = time.monotonic()
        if now + _POLL_SECONDS > end:
            return _failed(f"not ready after {args.timeout:g} s: {reason}")
        if now >= tell_at:
            tell_at = now + _TELL_SECONDS
            said = f"{PROG}: waiting since {now - begun:.0f} s: {reason}"
            print(printable_lines(said), file=sys.stderr)
        time.sleep(_POLL_SECONDS)


def _failed(text: str) -> int:
    print(printable_lines(f"{PROG}: {text}"), file=sys.stderr)
    return 1


def _probes(args: argparse.Namespace, environ: Mapping[str, str]) -> Target:
    """Return the listener that has the probes: `metrics` where there is one, else `admin`."""
    is_apart = args.url is None and load(args, environ).settings.has_metrics
    return target_of(args, environ, "metrics" if is_apart else "admin")


def _healthcheck_options(parser: argparse.ArgumentParser) -> None:
    add_listeners(parser, "admin", "metrics", path="/readyz")


def _healthcheck(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    reason, _ = why_not_ok(_probes(args, environ), _PROBE_SECONDS)
    if reason:
        # stdout, as all of it is what a runtime of containers shows
        print(printable_lines(f"{PROG}: {reason}"))
    return 1 if reason else 0


def _drain_options(parser: argparse.ArgumentParser) -> None:
    text = "give up after this time (default: drain_timeout_seconds)"
    parser.add_argument("--timeout", type=positive, metavar="SECONDS", help=text)
    add_token(parser)
    add_listeners(parser, "admin", path="/drain")


def _drain(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    seconds = args.timeout or load(args, environ).settings.drain_timeout_seconds
    path = f"/drain?timeout={seconds:f}"
    target = target_of(args, environ, "admin")
    headers = control_headers(args, environ)
    reason, status = why_not_ok(target, seconds + _PROBE_SECONDS, "POST", path, headers)
    if status == HTTPStatus.UNAUTHORIZED:
        reason += f"\n  {TOKEN_HINT}"
    return _failed(reason) if reason else 0


COMMANDS = {
    "wait": (_wait_options, _wait),
    "healthcheck": (_healthcheck_options, _healthcheck),
    "drain": (_drain_options, _drain),
}

"""Waits for an adapter, asks for its health and drains it: wait, healthcheck and drain."""

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus

from adapter.cli.client import Target, Unreachable, ask, find_target
from adapter.cli.options import (
    TOKEN_HINT,
    add_listeners,
    control_headers,
    parse_seconds,
    read_settings,
)
from adapter.cli.parser import PROG
from adapter.cli.text import escape, escape_lines

_PROBE_SECONDS = 2.0  # SageMaker's limit for /ping
_POLL_SECONDS = 0.1
_REPORT_SECONDS = 5.0  # from one line on stderr to the next
_WAIT_SECONDS = 120.0
# the answers of a listener without this path, for which waiting does not help
_WRONG_LISTENER = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED})


def probe(
    target: Target,
    timeout_seconds: float,
    method: str = "GET",
    path: str = "",  # the default is the path of the target, or /readyz
    headers: Mapping[str, str] | None = None,
) -> tuple[str, int | None]:
    """Return why a listener does not answer 200, empty if it does, and the status if it answers."""
    path = path or target.path or "/readyz"
    base = replace(target, path="")
    try:
        answer = ask(base, method, path, timeout_seconds=timeout_seconds, headers=headers)
    except Unreachable as error:
        return f"{error}\n  {error.hint}", None
    if answer.is_ok:
        return "", answer.status
    url = str(base) if target.socket_path else f"{base}{path.partition('?')[0]}"
    return f"{url}: {answer.status} {escape(answer.reason() or answer.text())}", answer.status


def _find_probes(args: argparse.Namespace, environ: Mapping[str, str]) -> Target:
    """Return the listener with the probes: `metrics` if it is open, otherwise `admin`."""
    has_metrics = args.url is None and read_settings(args, environ).settings.has_metrics
    return find_target(args, environ, "metrics" if has_metrics else "admin")


def _print_problem(text: str) -> int:
    """Print a text on stderr behind the name of the command, and return the exit code 1."""
    print(escape_lines(f"{PROG}: {text}"), file=sys.stderr)
    return 1


def _add_wait_options(parser: argparse.ArgumentParser) -> None:
    text = f"give up after this time (default: {_WAIT_SECONDS:g})"
    parser.add_argument(
        "--timeout", type=parse_seconds, default=_WAIT_SECONDS, metavar="SECONDS", help=text
    )
    _add_healthcheck_options(parser)


def _wait(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Ask again and again until the adapter is ready; print now and then why it is not."""
    target = _find_probes(args, environ)
    started_at = time.monotonic()
    deadline = started_at + args.timeout
    report_at = started_at + _REPORT_SECONDS
    while True:
        remaining_seconds = deadline - time.monotonic()
        reason, status = probe(target, max(0.1, min(_PROBE_SECONDS, remaining_seconds)))
        if not reason:
            return 0
        if status in _WRONG_LISTENER:
            advice = "name the listener with the probes by --admin, --metrics or --url"
            return _print_problem(f"{reason}\n  {advice}")
        now = time.monotonic()
        if now + _POLL_SECONDS > deadline:
            return _print_problem(f"not ready after {args.timeout:g} s: {reason}")
        if now >= report_at:
            report_at = now + _REPORT_SECONDS
            _print_problem(f"waiting since {now - started_at:.0f} s: {reason}")
        time.sleep(_POLL_SECONDS)


def _add_healthcheck_options(parser: argparse.ArgumentParser) -> None:
    add_listeners(parser, "admin", "metrics", path="/readyz")


def _check_health(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Ask once whether the adapter is ready, and print why it is not."""
    reason, _ = probe(_find_probes(args, environ), _PROBE_SECONDS)
    if not reason:
        return 0
    # a container runtime shows what a health check writes to stdout
    print(escape_lines(f"{PROG}: {reason}"))
    return 1


def _add_drain_options(parser: argparse.ArgumentParser) -> None:
    text = "give up after this time (default: drain_timeout_seconds)"
    parser.add_argument("--timeout", type=parse_seconds, metavar="SECONDS", help=text)
    add_listeners(parser, "admin", path="/drain")


def _drain(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Have the adapter refuse new work, and wait until it has answered what is in flight."""
    seconds = args.timeout or read_settings(args, environ).settings.drain_timeout_seconds
    target = find_target(args, environ, "admin")
    path = f"{target.path or '/drain'}?timeout={seconds:f}"
    headers = control_headers(args, environ)
    reason, status = probe(target, seconds + _PROBE_SECONDS, "POST", path, headers)
    if not reason:
        return 0
    if status == HTTPStatus.UNAUTHORIZED:
        reason += f"\n  {TOKEN_HINT}"
    return _print_problem(reason)


COMMANDS = {
    "wait": (_add_wait_options, _wait),
    "healthcheck": (_add_healthcheck_options, _check_health),
    "drain": (_add_drain_options, _drain),
}

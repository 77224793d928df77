"""The command line. Starts fast: whatever is heavy is imported by the command that needs it."""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_origin
from urllib.parse import urlsplit

from adapter.cli.commands import COMMANDS
from adapter.errors import AdapterError, InvalidSettings

if TYPE_CHECKING:
    from adapter.settings import Address, Loaded

_PROG = "triton-adapter"
_PROBE_SECONDS = 2.0  # what SageMaker allows for /ping
_POLL_SECONDS = 0.1
_DEPENDENCIES = ("aiohttp", "grpcio", "protobuf", "tritonclient", "uvloop", "nvidia-pytriton")


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one command. Returns 0 if done, 2 for bad settings or arguments, else 1."""
    try:
        args = _parsed(argv)
        return _RUN[args.command](args, environ)
    except SystemExit as stop:  # argparse: 0 after --help, 2 after a usage error
        return int(stop.code or 0)
    except InvalidSettings as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return 2
    except AdapterError as error:
        print(f"{_PROG}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser(argv)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        from adapter.settings import like_flag  # noqa: PLC0415 - pydantic

        parser.error(f"unrecognized arguments: {' '.join(unknown)}{like_flag(unknown[0])}")
    return args


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser. Only the given command gets its options: settings cost an import."""
    wanted = next((word for word in argv if not word.startswith("-")), "")
    top = argparse.ArgumentParser(
        prog=_PROG,
        description="The contracts of SageMaker and ModelMesh in front of a stock NVIDIA Triton.",
        epilog=_epilog(
            ["triton-adapter serve --triton=embedded --examples", "triton-adapter serve --help"]
        )
        + "\nexit codes: 0 done; 2 bad settings; 1 anything else",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = top.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    for name, (summary, *examples) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary.capitalize() + ".",
            epilog=_epilog(examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == wanted:
            _add_options(command, name)
    return top


def _epilog(examples: Sequence[str]) -> str:
    return "examples:\n" + "".join(f"  {line}\n" for line in examples)


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    if name in {"serve", "check-config", "wait", "healthcheck", "drain"}:
        text = "YAML file of settings (or ADAPTER_CONFIG)"
        command.add_argument("--config", type=Path, metavar="FILE", help=text)
    if name in {"wait", "healthcheck"}:
        text = "http://HOST:PORT/PATH or unix:/SOCKET (default: /readyz at the admin listener)"
        command.add_argument("--url", help=text)
    if name == "wait":
        text = "give up then (default: 120)"
        command.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help=text)
    if name == "check-config":
        command.add_argument("--json", action="store_true", help="for programs")
    if name == "version":
        text = "with Python and the key dependencies"
        command.add_argument("--all", action="store_true", help=text)
    if name in {"serve", "demo", "check-config"}:
        _add_settings(command)
    if name in _OWN_OPTIONS:
        _OWN_OPTIONS[name](command)


def _drain_options(command: argparse.ArgumentParser) -> None:
    text = "http://HOST:PORT/drain or unix:/SOCKET (default: /drain at the admin listener)"
    command.add_argument("--url", help=text)
    text = "give up then (default: drain_timeout_seconds)"
    command.add_argument("--timeout", type=_positive, metavar="SECONDS", help=text)


def _inspect_options(command: argparse.ArgumentParser) -> None:
    from adapter.cli import inspect  # noqa: PLC0415 - see the top

    inspect.add_options(command)


def _bench_options(command: argparse.ArgumentParser) -> None:
    from bench.command import add_arguments  # noqa: PLC0415 - see the top

    add_arguments(command)


def _add_settings(command: argparse.ArgumentParser) -> None:
    """Add one flag for each setting. Values stay text: load_settings finds all their faults."""
    from adapter.settings import Settings, as_text, flag_of, variable_of  # noqa: PLC0415 - pydantic

    for name, field in Settings.model_fields.items():
        default = as_text(name, field.default)
        text = f"{field.description} (default: {default}; environment: {variable_of(name)})"
        text = text.replace("%", "%%")
        if field.annotation is bool:
            action = argparse.BooleanOptionalAction
            command.add_argument(flag_of(name), action=action, default=None, help=text)
        elif get_origin(field.annotation) is tuple:
            command.add_argument(
                flag_of(name), action="append", metavar="VALUE", help=f"{text}; repeatable"
            )
        else:
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            command.add_argument(flag_of(name), metavar="|".join(choices) or "VALUE", help=text)


def _flags(args: argparse.Namespace) -> dict[str, object]:
    from adapter.settings import Settings  # noqa: PLC0415 - pydantic

    given = vars(args)
    return {name: given[name] for name in Settings.model_fields if given.get(name) is not None}


def _load(args: argparse.Namespace, environ: Mapping[str, str]) -> "Loaded":
    from adapter.settings import load_settings  # noqa: PLC0415 - pydantic

    return load_settings(_flags(args), environ, args.config)


def _serve(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    loaded = _load(args, environ)
    from adapter.cli.demo import welcome  # noqa: PLC0415 - see the top
    from adapter.cli.serving import run  # noqa: PLC0415 - see the top

    return run(loaded, welcome if loaded.settings.examples else None)


def _demo(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    from adapter.cli.demo import run_demo  # noqa: PLC0415 - see the top

    return run_demo(_flags(args))


def _inspect(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    from adapter.cli import inspect  # noqa: PLC0415 - see the top

    return inspect.run(args)


def _bench(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    from bench.command import run  # noqa: PLC0415 - see the top

    return run(args)


def _healthcheck(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from adapter.cli.probe import why_not_ready  # noqa: PLC0415 - see the top

    reason = why_not_ready(_target(args, environ), _PROBE_SECONDS)
    if reason:
        print(reason)
    return 1 if reason else 0


def _drain(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from adapter.cli.probe import why_not_ok  # noqa: PLC0415 - see the top

    seconds = args.timeout or _load(args, environ).settings.drain_timeout_seconds
    asked = f"/drain?timeout={seconds:f}"
    reason = why_not_ok("POST", _target(args, environ), asked, seconds + _PROBE_SECONDS)
    if reason:
        print(reason, file=sys.stderr)
    return 1 if reason else 0


def _positive(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise ValueError(text)
    return seconds


def _wait(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from adapter.cli.probe import why_not_ready  # noqa: PLC0415 - see the top

    target = _target(args, environ)
    end = time.monotonic() + args.timeout
    while reason := why_not_ready(target, max(0.1, min(_PROBE_SECONDS, end - time.monotonic()))):
        if time.monotonic() + _POLL_SECONDS > end:
            print(f"not ready after {args.timeout:g} s: {reason}", file=sys.stderr)
            return 1
        time.sleep(_POLL_SECONDS)
    return 0


def _target(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Return the --url, or that of /readyz at the admin listener, for this machine."""
    if args.url is None:
        return _ready_url(_load(args, environ).settings.admin)
    try:
        url = urlsplit(args.url)
        is_whole = url.port != 0 and bool({"http": url.netloc, "unix": url.path}.get(url.scheme))
    except ValueError:  # the port
        is_whole = False
    if not is_whole:
        rule = "write http://HOST:PORT/PATH or unix:/SOCKET"
        raise InvalidSettings([f"flag --url: {args.url!r}: {rule}"])
    return str(args.url)


def _ready_url(address: "Address") -> str:
    if address.kind == "unix":
        return str(address)
    if address.kind == "off" or address.port == 0:
        raise InvalidSettings(
            [f"setting admin: {str(address)!r}: no address to ask; name one by --url"]
        )
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)  # noqa: S104 - compared
    return f"http://{replace(address, host=near)}/readyz"


def _check_config(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from adapter.settings import for_programs, masked  # noqa: PLC0415 - pydantic

    loaded = _load(args, environ)
    for warning in loaded.warnings:
        print(warning, file=sys.stderr)
    if args.json:
        print(json.dumps(for_programs(loaded), indent=2))
    else:
        settings, origins = loaded.settings, loaded.origins
        _print_table([(name, masked(name, value), origins[name]) for name, value in settings])
    return 0


def _print_table(rows: Sequence[tuple[str, object, str]]) -> None:
    from adapter.settings import as_text  # noqa: PLC0415 - pydantic

    texts = [(name, as_text(name, value), origin) for name, value, origin in rows]
    widths = [max(len(row[i]) for row in texts) for i in (0, 1)]
    for name, value, origin in texts:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")


def _version(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - see the top

    for name in (_PROG, *_DEPENDENCIES) if args.all else (_PROG,):
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} not installed")
    if args.all:
        print(f"python {sys.version.split()[0]}")
    return 0


_OWN_OPTIONS = {"drain": _drain_options, "inspect": _inspect_options, "bench": _bench_options}
_RUN = {
    "serve": _serve,
    "demo": _demo,
    "inspect": _inspect,
    "bench": _bench,
    "wait": _wait,
    "healthcheck": _healthcheck,
    "drain": _drain,
    "check-config": _check_config,
    "version": _version,
}

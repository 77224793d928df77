"""The commands that run an adapter: serve and demo."""

import argparse
import os
from collections.abc import Mapping

from adapter.cli.options import add_config, add_settings, examples_folder, flags, load


def _serve_options(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    text = "add the example models to model_roots, and print curl lines for them"
    parser.add_argument("--examples", action="store_true", help=text)
    add_settings(parser)


def _quiet_grpc() -> None:
    """Have gRPC not write to stderr at each fork: no Python of ours goes on in one.

    To be called before it is imported.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def _serve(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    _quiet_grpc()
    loaded = load(args, environ)
    if args.examples:
        loaded = loaded.with_root(examples_folder())
    from adapter.settings import SECRETS, variable_of  # noqa: PLC0415 - pydantic

    for name in SECRETS:  # what is started from here, Triton and its models, has no use for it
        os.environ.pop(variable_of(name), None)
    from adapter.cli.demo import welcome  # noqa: PLC0415 - the whole adapter, as the next one
    from adapter.cli.serving import run  # noqa: PLC0415

    return run(loaded, welcome if args.examples else None)


def _demo(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Run the demo: it has settings of its own, and takes none from environment or file."""
    _quiet_grpc()
    from adapter.cli.demo import run_demo  # noqa: PLC0415 - the whole adapter

    return run_demo(flags(args))


def _demo_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the few settings that the demo leaves open."""
    text = "the tritonserver to run (default: as for `serve`)"
    parser.add_argument("--tritonserver", metavar="FILE", help=text)
    text = "of the log, whose end is shown when a step fails (default: info)"
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log-level", choices=levels, metavar="|".join(levels), help=text)


COMMANDS = {"serve": (_serve_options, _serve), "demo": (_demo_options, _demo)}

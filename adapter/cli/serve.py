"""Runs an adapter: the command serve."""

import argparse
import os
from collections.abc import Mapping

from adapter.cli.options import add_config, add_settings, examples_folder, load


def _serve_options(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    text = "add the example models to model_roots, and print curl lines for them"
    parser.add_argument("--examples", action="store_true", help=text)
    add_settings(parser)


def quiet_grpc() -> None:
    """Have gRPC not write to stderr at each fork: no Python of ours goes on in one.

    To be called before it is imported.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def _serve(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Load the settings, erase secrets from this process's environment, and run the adapter."""
    quiet_grpc()
    loaded = load(args, environ)
    if args.examples:
        loaded = loaded.with_root(examples_folder())
    from adapter.runtime.variables import erase_values  # noqa: PLC0415 - ctypes
    from adapter.settings import SECRETS, secret_variables, variable_of  # noqa: PLC0415 - pydantic

    own = {variable_of(name) for name in SECRETS}
    # models of an embedded Triton run as the same user, and could read /proc/PID/environ
    erase_values(own | secret_variables(loaded.settings.endpoint_keys))
    for name in own:  # Triton and its models need none of the adapter's own secrets
        os.environ.pop(name, None)
    from adapter.cli.serving import run, welcome  # noqa: PLC0415 - the whole adapter

    return run(loaded, welcome if args.examples else None)


COMMANDS = {"serve": (_serve_options, _serve)}

"""The command demo: a guided tour on a Triton of its own."""

import argparse
from collections.abc import Mapping

from adapter.cli.options import flags
from adapter.cli.serve import quiet_grpc


def _demo(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Run the demo: it has settings of its own, and takes none from environment or file."""
    quiet_grpc()
    from adapter.tools.demo.tour import run_demo  # noqa: PLC0415 - the whole adapter

    return run_demo(flags(args))


def _demo_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the few settings that the demo leaves open."""
    text = "the tritonserver to run (default: as for `serve`)"
    parser.add_argument("--tritonserver", metavar="FILE", help=text)
    text = "of the log, whose end is shown when a step fails (default: info)"
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--log-level", choices=levels, metavar="|".join(levels), help=text)


COMMANDS = {"demo": (_demo_options, _demo)}

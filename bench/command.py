"""The command `triton-adapter bench`: its arguments, and how its result is written."""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapter.cli.text import printable
from adapter.errors import InvalidSettings
from bench.arguments import (
    CLOSED_CONNECTIONS,
    OPEN_CONNECTIONS,
    SECONDS,
    SLICES,
    header,
    make_plan,
    positive,
    shape,
    whole,
    zero_or_more,
)
from bench.extra import needed
from bench.plan import Plan, Protocol

_STDOUT = Path("-")
_PICTURES = (".png", ".svg", ".pdf")
_EPILOG = """\
examples:
  closed loop, 8 connections, for 10 seconds
    triton-adapter bench http://127.0.0.1:8080 --model digits
  500 requests a second, Poisson; latency counts from when each was due
    triton-adapter bench http://127.0.0.1:8080 --model digits --payload sample.json \\
      --rate 500 --arrivals poisson --duration 30
  binary tensors of 4 MiB, through the adapter and past it, in turn
    triton-adapter bench http://127.0.0.1:8080 --protocol sagemaker-binary --model identity \\
      --shape IN=1048576 --compare http://127.0.0.1:8000 --compare-protocol v2-binary
  gRPC, 2 connections with 4 calls in flight on each
    triton-adapter bench grpc://127.0.0.1:8001 --model identity --connections 2 --streams 4
  many models, a few of them popular, while another one comes and goes
    triton-adapter bench http://127.0.0.1:8080 --models-from-list --zipf 1.1 --payload in.json \\
      --churn /models/big --churn-every 3 --plot churn.png --json churn.json
  CPU and memory that a server takes for it
    triton-adapter bench http://127.0.0.1:8080 --model digits --cpu-pid $(pgrep -o triton-adapter)

protocols: sagemaker-json and sagemaker-binary POST /models/NAME/invoke, v2-json and v2-binary
POST /v2/models/NAME/infer, endpoint-json POST /endpoints/any/invocations with NAME as
TargetModel, grpc calls ModelInfer. http: and unix: mean sagemaker-json unless
--protocol says otherwise, grpc: means grpc.

Ctrl-C ends the run and shows what there is.
exit codes: 0 every request was answered well; 1 some were not, or no one answered; 2 bad arguments
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    _add_targets(parser)
    _add_load(parser.add_argument_group("load"))
    _add_payload(parser.add_argument_group("what is sent"))
    _add_meanwhile(parser.add_argument_group("what is watched, and written"))


def _add_targets(parser: argparse.ArgumentParser) -> None:
    protocols = [each.value for each in Protocol]
    text = "http://HOST:PORT, grpc://HOST:PORT or unix:/SOCKET"
    parser.add_argument("url", metavar="URL", help=text)
    parser.add_argument("--protocol", choices=protocols, help="(default: by URL, see below)")
    text = "measure this target in turn with URL, and print ratios"
    parser.add_argument("--compare", metavar="URL", help=text)
    text = "(default: that of URL where both are HTTP, else by the URL)"
    parser.add_argument("--compare-protocol", choices=protocols, help=text)
    text = f"slices of each target in turn (default: {SLICES} with --compare, else 1)"
    parser.add_argument("--slices", type=whole, metavar="N", help=text)
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--model", metavar="NAME", help="the model to invoke")
    models.add_argument("--models", metavar="A,B,C", help="several, the most popular one first")
    text = "all that GET /models at URL lists, in its order"
    models.add_argument("--models-from-list", action="store_true", help=text)
    text = "the k-th model is asked for with weight 1/k^S (default: 0, all alike)"
    parser.add_argument("--zipf", type=zero_or_more, default=0.0, metavar="S", help=text)


def _add_load(group: Any) -> None:
    text = f"(default: {CLOSED_CONNECTIONS}, with --rate {OPEN_CONNECTIONS})"
    group.add_argument("--connections", type=whole, metavar="N", help=text)
    text = "calls in flight on each gRPC connection (default: 1)"
    group.add_argument("--streams", type=whole, default=1, metavar="N", help=text)
    text = "open loop: send so many a second, whether or not answers come (default: closed loop)"
    group.add_argument("--rate", type=positive, metavar="R", help=text)
    text = "of an open loop (default: constant)"
    group.add_argument("--arrivals", choices=["constant", "poisson"], default="constant", help=text)
    text = f"for each target (default: {SECONDS:g}, without --count)"
    group.add_argument("--duration", type=positive, metavar="SECONDS", help=text)
    group.add_argument("--count", type=whole, metavar="N", help="requests for each target")
    text = "closed loop before it, which does not count (default: 1)"
    group.add_argument("--warmup", type=zero_or_more, default=1.0, metavar="SECONDS", help=text)
    text = "a request without an answer then is an error (default: 60)"
    group.add_argument("--timeout", type=positive, default=60.0, metavar="SECONDS", help=text)


def _add_payload(group: Any) -> None:
    text = "where to ask for the models' inputs (default: URL, then the target of --compare)"
    group.add_argument("--metadata", metavar="URL", help=text)
    text = "a V2 inference request in JSON, for all models, instead of one made from metadata"
    group.add_argument("--payload", type=Path, metavar="FILE", help=text)
    text = "size of a leading dynamic dimension; other dynamic ones are 1 (default: 1)"
    group.add_argument("--batch", type=whole, default=1, metavar="N", help=text)
    text = "whole shape of one input; repeatable"
    group.add_argument(
        "--shape", type=shape, action="append", default=[], metavar="INPUT=N,N", help=text
    )
    text = (
        "sent with every request; {model} in it is the model's name, {hex32} are 32 hexadecimal"
        " digits, new in each request; repeatable"
    )
    group.add_argument(
        "--header", type=header, action="append", default=[], metavar="NAME:VALUE", help=text
    )
    text = (
        "send the headers of this request, which a client of yours wrote; several are taken in turn"
    )
    group.add_argument("--head", type=Path, action="append", default=[], metavar="FILE", help=text)


def _add_meanwhile(group: Any) -> None:
    text = "load this package by POST /models, unload it, and so on, as bench-churn"
    group.add_argument("--churn", metavar="PACKAGE_URL", help=text)
    text = "from one load or unload to the next (default: 2)"
    group.add_argument("--churn-every", type=positive, default=2.0, metavar="SECONDS", help=text)
    text = "HTTP URL for --churn (default: the target that is measured)"
    group.add_argument("--churn-at", metavar="URL", help=text)
    text = "report CPU time a request and memory of this process; repeatable"
    group.add_argument("--cpu-pid", type=whole, action="append", default=[], help=text)
    text = "of the timeline (default: 1)"
    group.add_argument("--interval", type=positive, default=1.0, metavar="SECONDS", help=text)
    text = "write the result there; -: to stdout, and the table to stderr"
    group.add_argument("--json", type=Path, metavar="FILE", help=text)
    text = "draw percentiles and timeline there (needs the extra `bench`)"
    group.add_argument("--plot", type=Path, metavar="FILE.png", help=text)


def run(args: argparse.Namespace, _environ: Mapping[str, str] | None = None) -> int:
    """InvalidSettings for bad arguments, AdapterError when nothing can be measured."""
    plan = make_plan(args)
    _check_extra(plan, draws=args.plot is not None)
    import uvloop  # noqa: PLC0415 - --help does not need it

    from bench.session import Session  # noqa: PLC0415 - nor this

    _touch(args)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(Session(plan).run())
    from bench.report import lines  # noqa: PLC0415 - nor these
    from bench.results import results  # noqa: PLC0415

    result = results(plan, outcome)
    table = sys.stderr if args.json == _STDOUT else sys.stdout
    table.write("\n".join(map(printable, lines(result))) + "\n")
    _write(args, result)
    return 0 if all(_is_good(target) for target in result["targets"]) else 1


def _check_extra(plan: Plan, *, draws: bool) -> None:
    protocols = {target.protocol for target in plan.targets}
    if Protocol.GRPC in protocols:
        needed("hpack")
    if protocols - {Protocol.GRPC}:
        needed("httptools")
    if draws:
        needed("matplotlib")


def _touch(args: argparse.Namespace) -> None:
    """Fail before the run where a result file cannot be written."""
    if args.plot is not None and args.plot.suffix not in _PICTURES:
        raise InvalidSettings([f"flag --plot: {args.plot} must end in {', '.join(_PICTURES)}"])
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and path != _STDOUT:
            try:
                path.touch()
            except OSError as error:
                raise InvalidSettings([f"flag {flag}: {error}"]) from error


def _write(args: argparse.Namespace, result: dict[str, Any]) -> None:
    text = json.dumps(result, indent=2) + "\n"
    if args.json == _STDOUT:
        sys.stdout.write(text)
    elif args.json is not None:
        args.json.write_text(text, encoding="utf-8")
    if args.plot is not None:
        from bench.plot import draw  # noqa: PLC0415 - matplotlib

        draw(result, args.plot)


def _is_good(target: dict[str, Any]) -> bool:
    is_churn_good = not any(change["error"] for change in target["churn"])
    return bool(target["answered"]) and not target["errors"] and is_churn_good


COMMANDS = {"bench": (add_arguments, run)}

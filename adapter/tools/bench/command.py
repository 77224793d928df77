"""The command `triton-adapter bench`: its arguments, the plan made of them, and its output."""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapter.tools.bench.errors import BadArguments, BenchError, needed, printable
from adapter.tools.bench.payload import Payload, Shape, from_file
from adapter.tools.bench.plan import (
    Address,
    Churn,
    Headers,
    Pace,
    Plan,
    Protocol,
    Target,
    parse_header,
    parse_url,
    read_head,
)
from adapter.tools.bench.record import usage

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

Ctrl-C ends the run and shows the results so far.
exit codes: 0 every request was answered well; 1 some were not, or no one answered; 2 bad arguments
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    _add_targets(parser)
    _add_load(parser.add_argument_group("load"))
    _add_payload(parser.add_argument_group("requests"))
    _add_meanwhile(parser.add_argument_group("monitoring and output"))


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


def run(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    try:
        return measure(args)
    except BadArguments as error:
        problems, code = error.problems, 2
    except BenchError as error:
        problems, code = [str(error)], 1
    for problem in problems:
        lines = "\n".join(map(printable, problem.split("\n")))
        print(f"triton-adapter: {lines}", file=sys.stderr)
    return code


def measure(args: argparse.Namespace) -> int:
    """Run as the arguments say; return the exit code. Raises BadArguments, and BenchError when
    nothing can be measured.
    """
    plan = make_plan(args)
    _check_extra(plan, draws=args.plot is not None)
    import uvloop  # noqa: PLC0415 - --help does not need it

    from adapter.tools.bench.session import Session  # noqa: PLC0415 - nor this

    _touch(args)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(Session(plan).run())
    from adapter.tools.bench.results import lines, results  # noqa: PLC0415 - nor these

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
        raise BadArguments([f"flag --plot: {args.plot} must end in {', '.join(_PICTURES)}"])
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and path != _STDOUT:
            try:
                path.touch()
            except OSError as error:
                raise BadArguments([f"flag {flag}: {error}"]) from error


def _write(args: argparse.Namespace, result: dict[str, Any]) -> None:
    text = json.dumps(result, indent=2) + "\n"
    if args.json == _STDOUT:
        sys.stdout.write(text)
    elif args.json is not None:
        args.json.write_text(text, encoding="utf-8")
    if args.plot is not None:
        from adapter.tools.bench.plot import draw  # noqa: PLC0415 - matplotlib

        draw(result, args.plot)


def _is_good(target: dict[str, Any]) -> bool:
    is_churn_good = not any(change["error"] for change in target["churn"])
    return bool(target["answered"]) and not target["errors"] and is_churn_good


COMMANDS = {"bench": (add_arguments, run)}


CLOSED_CONNECTIONS, OPEN_CONNECTIONS, SLICES, SECONDS = 8, 64, 5, 10.0
_MOST_STREAMS = 100  # what a server should allow at least, by RFC 9113 section 6.5.2


def whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def positive(text: str) -> float:
    number = zero_or_more(text)
    if number == 0:
        raise argparse.ArgumentTypeError("0 is not enough")
    return number


def zero_or_more(text: str) -> float:
    number = float(text)
    if not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, sizes = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not INPUT=N,N")
    return name, tuple(whole(size) for size in sizes.split(","))


def header(text: str) -> tuple[str, str]:
    try:
        return parse_header(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


class _Problems(list[str]):
    """Collects what is wrong with the arguments."""

    def place(self, flag: str, url: str) -> tuple[Address, Protocol] | None:
        try:
            return parse_url(url)
        except ValueError as error:
            self.append(f"{flag}: {url!r}: {error}")
            return None

    def http_address(self, flag: str, url: str) -> Address | None:
        place = self.place(flag, url)
        if place is not None and place[1] is Protocol.GRPC:
            self.append(f"{flag}: {url!r}: this must be an HTTP URL")
        return place[0] if place is not None else None


def make_plan(args: argparse.Namespace) -> Plan:
    problems = _Problems()
    targets = _targets(args, problems)
    metadata = problems.place("--metadata", args.metadata) if args.metadata else None
    payload = _payload(args.payload, problems) if args.payload else None
    heads = tuple(_head(path, problems) for path in args.head)
    churn = Churn(args.churn, args.churn_every) if args.churn else None
    problems += [f"--cpu-pid: no process {pid}" for pid in args.cpu_pid if usage(pid) is None]
    problems += _wrong_together(args, targets)
    if problems:
        raise BadArguments([f"flag {problem}" for problem in problems])
    return Plan(
        targets=targets,
        slices=_slices(args),
        models=_models(args),
        zipf=args.zipf,
        metadata=metadata,
        headers=tuple(args.header),
        heads=heads,
        shape=Shape(args.batch, dict(args.shape)),
        payload=payload,
        pace=_pace(args),
        churn=churn,
        pids=tuple(args.cpu_pid),
    )


def _targets(args: argparse.Namespace, problems: _Problems) -> tuple[Target, ...]:
    first = problems.place("URL", args.url)
    second = problems.place("--compare", args.compare) if args.compare else None
    if first is None:
        return ()
    protocol = Protocol(args.protocol) if args.protocol else first[1]
    targets = [_target(args, problems, "URL", args.url, (first[0], protocol))]
    if second is not None:
        if args.compare_protocol:
            other = Protocol(args.compare_protocol)
        else:
            is_same = Protocol.GRPC not in {protocol, second[1]}
            other = protocol if is_same else second[1]
        targets.append(_target(args, problems, "--compare", args.compare, (second[0], other)))
    return tuple(targets)


def _target(
    args: argparse.Namespace,
    problems: _Problems,
    flag: str,
    url: str,
    place: tuple[Address, Protocol],
) -> Target:
    address, protocol = place
    if url.startswith("grpc:") and protocol is not Protocol.GRPC:
        problems.append(f"{flag}: {url!r}: {protocol.value} is not spoken at a gRPC URL")
    if not args.churn:
        return Target(url, address, protocol)
    if not args.churn_at and protocol is Protocol.GRPC:
        problems.append(f"--churn: {url!r} has no /models; name an HTTP URL by --churn-at")
    churn_at = problems.http_address("--churn-at", args.churn_at) if args.churn_at else address
    return Target(url, address, protocol, churn_at)


def _payload(path: Path, problems: _Problems) -> Payload | None:
    try:
        return from_file(path.read_bytes())
    except (OSError, BenchError) as error:
        problems.append(f"--payload: {str(path)!r}: {error}")
        return None


def _head(path: Path, problems: _Problems) -> Headers:
    try:
        return read_head(path.read_text())
    except (OSError, ValueError) as error:
        problems.append(f"--head: {str(path)!r}: {error}")
        return ()


def _models(args: argparse.Namespace) -> tuple[str, ...]:
    if args.model:
        return (args.model,)
    return tuple(args.models.split(",")) if args.models else ()


def _slices(args: argparse.Namespace) -> int:
    return int(args.slices or (SLICES if args.compare else 1))


def _pace(args: argparse.Namespace) -> Pace:
    usual = CLOSED_CONNECTIONS if args.rate is None else OPEN_CONNECTIONS
    return Pace(
        connections=args.connections or usual,
        streams=args.streams,
        rate=args.rate,
        poisson=args.arrivals == "poisson",
        seconds=args.duration or (None if args.count else SECONDS),
        count=args.count,
        warmup_seconds=args.warmup,
        timeout_seconds=args.timeout,
        interval_seconds=args.interval,
    )


def _wrong_together(args: argparse.Namespace, targets: tuple[Target, ...]) -> list[str]:
    is_grpc = all(target.protocol is Protocol.GRPC for target in targets)
    has_grpc = any(target.protocol is Protocol.GRPC for target in targets)
    listed = args.models.split(",") if args.models else []
    rules = {
        "--streams: HTTP/1.1 has one request in flight on a connection": args.streams > 1
        and not is_grpc,
        f"--streams: at most {_MOST_STREAMS}": args.streams > _MOST_STREAMS,
        "--count: less than one request a slice": args.count is not None
        and args.count < _slices(args),
        "--head: HTTP/2 has no such heads; give --header": bool(args.head) and has_grpc,
        "--arrivals: a closed loop has no schedule; give --rate": args.arrivals == "poisson"
        and args.rate is None,
        "--compare-protocol: needs --compare": bool(args.compare_protocol) and not args.compare,
        "--churn-at: needs --churn": bool(args.churn_at) and not args.churn,
        "--models: an empty name": "" in listed or args.model == "",
        "--models: a name comes twice": len(set(listed)) < len(listed),
        "--models-from-list: URL is not HTTP": args.models_from_list
        and bool(targets)
        and targets[0].protocol is Protocol.GRPC,
        "--payload: has its own shape; leave --shape and --batch away": args.payload is not None
        and (bool(args.shape) or args.batch > 1),
    }
    return [problem for problem, is_wrong in rules.items() if is_wrong]

"""Makes a plan of the arguments. InvalidSettings names everything that is wrong with them."""

import argparse
import math
from pathlib import Path

from adapter.errors import InvalidRequest, InvalidSettings
from bench.payload import Payload, Shape, from_file
from bench.plan import (
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
from bench.process import usage

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
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 on")
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
        raise InvalidSettings([f"flag {problem}" for problem in problems])
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
    except (OSError, InvalidRequest) as error:
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

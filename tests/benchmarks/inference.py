"""What an inference costs: the adapter, the copying proxy and Triton alone, in turn."""

import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from tests.benchmarks.copying import copying
from tests.benchmarks.figures import Json, added, of, over, spread
from tests.benchmarks.place import (
    MIB,
    NotMeasuredError,
    Scale,
    Side,
    forget_peak,
    in_turns,
    load,
    rss_bytes,
    stack,
)
from tests.benchmarks.rows import CLIENTS, SIZES
from tests.running import Client, RunningAdapter

_HEADS = Path(__file__).with_name("heads")
_TRACE = "--header=traceparent: 00-{hex32}-{hex16}-01"
_STREAMS = ("--connections=1", "--streams=8")
_CALLERS = 32
_FLOATS_OF_25_MIB = 25 * 2**18
_ROOM = "--grpc-max-message-bytes=64MiB"  # for those
_FAST_PATH = "triton_adapter_requests_fast"


@contextmanager
def _three(
    scheme: str, *protocols: str, flags: Sequence[str] = ()
) -> Iterator[tuple[RunningAdapter, dict[str, Side]]]:
    """The adapter, the copying proxy, their Triton; `protocols`: the adapter's and the others'."""
    with stack(*flags) as adapter:
        is_grpc = scheme == "grpc"
        triton = adapter.grpc_address if is_grpc else adapter.http_address
        asked = f"--metadata=grpc://{adapter.grpc_address}"
        own, others = protocols or ("grpc", "grpc")
        with copying(triton) as (proxy, pid):
            ours = adapter.grpc if is_grpc else adapter.http
            at = {"adapter": (ours, own), "copying": (proxy, others), "triton": (triton, others)}
            pids = {"adapter": adapter.process.pid, "copying": pid}
            yield (
                adapter,
                {
                    name: Side((f"{scheme}://{to}", asked, f"--protocol={how}"), pids.get(name))
                    for name, (to, how) in at.items()
                },
            )


def seconds_of(scale: Scale) -> tuple[str, ...]:
    return (f"--duration={scale.seconds}", f"--warmup={0.1 if scale.is_quick else 0.5}")


def head_of(client: str) -> str:
    return f"--head={_HEADS / client}.http"


def metadata_of(client: str) -> list[str]:
    """What its calls have beside the headers that every call of gRPC has."""
    lines = (_HEADS / f"{client}.h2").read_text().splitlines()
    plain = re.compile(r"#|:|content-type:|te:")
    return [f"--header={line}" for line in lines if not plain.match(line)]


def rest(scale: Scale) -> Json:
    """JSON of one float, the heads of real clients in turn."""
    with _three("http", "sagemaker-json", "v2-json") as (_, sides):
        heads = [head_of(client) for client in CLIENTS]
        proxies = {name: sides[name] for name in ("adapter", "copying")}
        eight = in_turns(sides, scale.rounds, "--connections=8", *heads, *seconds_of(scale))
        differs = ("--connections=8", _TRACE, *heads, *seconds_of(scale))
        other = in_turns(proxies, scale.rounds, *differs)
        one = in_turns(sides, scale.rounds, "--connections=1", *heads, *seconds_of(scale))
    return {
        "cpu": over(eight, "cpu", "adapter", "copying"),
        "cpu_differs": over(other, "cpu", "adapter", "copying"),
        "rate": over(eight, "rate", "adapter", "copying"),
        "p50_added": added(one, "adapter", "copying", "triton"),
        **{f"{name}_us": of(eight, name, "cpu", 1e6) for name in proxies},
        **{f"{name}_rate": of(eight, name, "rate") for name in sides},
        "generator_us": of(eight, "triton", "generator", 1e6),
    }


def grpc(scale: Scale) -> Json:
    """A tensor of one float at the listener `grpc`, with the metadata of a real client."""
    with _three("grpc") as (_, sides):
        found = in_turns(
            sides, scale.rounds, *_STREAMS, *metadata_of("tritonclient-grpc"), *seconds_of(scale)
        )
    return {
        "cpu": over(found, "cpu", "adapter", "copying"),
        "rate": over(found, "rate", "adapter", "copying"),
        **{f"{name}_us": of(found, name, "cpu", 1e6) for name in ("adapter", "copying")},
        **{f"{name}_rate": of(found, name, "rate") for name in sides},
        "generator_us": of(found, "triton", "generator", 1e6),
    }


def sizes(scale: Scale) -> Json:
    """Raw tensors both ways, 4 connections."""
    found: Json = {}
    for way, scheme, protocols in (
        ("REST", "http", ("sagemaker-binary", "v2-binary")),
        ("gRPC", "grpc", ()),
    ):
        with _three(scheme, *protocols) as (_, sides):
            del sides["triton"]
            for size, floats in SIZES.items():
                args = ("--connections=4", f"--shape=IN={floats}", *seconds_of(scale))
                rounds = in_turns(sides, scale.rounds, *args)
                found[f"{way} {size} cpu"] = over(rounds, "cpu", "adapter", "copying")
                found[f"{way} {size} rate"] = over(rounds, "rate", "adapter", "copying")
                found[f"{way} {size} adapter_us"] = of(rounds, "adapter", "cpu", 1e6)
    return found


def memory(scale: Scale) -> Json:
    """The peak of the adapter's resident memory while 32 callers send 25 MiB each, over idle."""
    callers = 4 if scale.is_quick else _CALLERS
    big = (f"--shape=IN={_FLOATS_OF_25_MIB}", f"--connections={callers}", "--warmup=0")
    found: Json = {}
    for way, scheme, protocols in (
        ("REST", "http", ("sagemaker-binary", "v2-binary")),
        ("gRPC", "grpc", ()),
    ):
        growth = []
        for _ in range(min(3, scale.rounds)):
            with _three(scheme, *protocols, flags=(_ROOM,)) as (adapter, sides):
                at, pid = (*sides["adapter"].at, "--model=identity"), adapter.process.pid
                load(*at, "--count=200", f"--connections={callers}", "--warmup=0")
                idle = rss_bytes(pid)
                forget_peak(pid)
                load(*at, *big, f"--count={callers * min(2, scale.rounds)}", "--timeout=120")
                growth.append((rss_bytes(pid, "VmHWM") - idle) / MIB)
        found[way] = spread(growth)
    return found


def clients(scale: Scale) -> Json:
    """How many in a hundred requests of each client the fast path takes, by the adapter's count."""
    count = 200 if scale.is_quick else 2000
    found: Json = {}
    with _three("http", "sagemaker-json", "v2-json") as (adapter, sides):
        for client in CLIENTS:
            head = head_of(client)
            is_v2 = "Inference-Header" in Path(head.partition("=")[2]).read_text()
            at, *asked = sides["adapter"].at[:2]
            how = f"--protocol={'v2-binary' if is_v2 else 'sagemaker-json'}"
            args = (at, *asked, how, head, "--model=identity", "--warmup=0", f"--count={count}")
            shares = []
            for _ in range(max(3, scale.rounds)):
                before = _taken(adapter)
                load(*args)
                shares.append((_taken(adapter) - before) / count)
            found[client] = spread(shares, 100)
    return found


def _taken(adapter: RunningAdapter) -> float:
    with closing(Client(adapter.admin)) as probe:
        lines = probe.get("/metrics").body.decode().splitlines()
    if not any(_FAST_PATH in line for line in lines):
        raise NotMeasuredError(f"this adapter has no metric {_FAST_PATH}_total")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{_FAST_PATH}_total"))

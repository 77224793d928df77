"""What the adapter adds to an inference: the load tester at its door and at Triton's, in turn."""

from tests.benchmarks.copying import copying
from tests.benchmarks.figures import Json, compared, side, spread
from tests.benchmarks.place import MIB, Scale, forget_peak, load, rss_bytes, stack
from tests.benchmarks.stand_in import running
from tests.running import RunningAdapter

_STREAMS = 8
_FLOATS_OF_4_MIB = 2**20
_BIG_CALLERS = 4
_CALLERS = 32
_FLOATS_OF_25_MIB = 25 * 2**18
_ROOM = ("--grpc-max-message-bytes=64MiB",)  # for 25 MiB; the default is 16 MiB


def _rest(adapter: RunningAdapter) -> tuple[str, ...]:
    return (
        f"http://{adapter.http}",
        "--model=identity",
        f"--compare=http://{adapter.http_address}",
        f"--metadata=grpc://{adapter.grpc_address}",
        f"--cpu-pid={adapter.process.pid}",
    )


def _grpc(adapter: RunningAdapter) -> tuple[str, ...]:
    return (
        f"grpc://{adapter.doors['grpc_data']}",
        "--model=identity",
        f"--compare=grpc://{adapter.grpc_address}",
        f"--metadata=grpc://{adapter.grpc_address}",
        f"--cpu-pid={adapter.process.pid}",
    )


_JSON = ("--protocol=sagemaker-json", "--compare-protocol=v2-json")
_BINARY = ("--protocol=sagemaker-binary", "--compare-protocol=v2-binary")


def _counted(scale: Scale) -> tuple[str, ...]:
    """So many requests a round, however long they take, within reason."""
    rounds = scale.rounds
    return (
        f"--slices={rounds}",
        f"--count={scale.requests * rounds}",
        f"--duration={30 * rounds}",
        "--warmup=0.5",
    )


def _timed(scale: Scale, share: float = 1.0) -> tuple[str, ...]:
    seconds = scale.seconds * scale.rounds * share
    return (f"--slices={scale.rounds}", f"--duration={seconds}", "--warmup=0.5")


def rest_small(scale: Scale) -> Json:
    """JSON of one float, by how many connections."""
    with stack() as adapter:
        return {
            str(number): compared(
                load(
                    *_rest(adapter),
                    *_JSON,
                    *(_counted(scale) if number == 8 else _timed(scale)),
                    f"--connections={number}",
                )
            )
            for number in scale.connections
        }


def grpc_small(scale: Scale) -> Json:
    """A tensor of one float, by how many calls are in flight on one connection."""
    with stack() as adapter:
        return {
            str(number): compared(
                load(
                    *_grpc(adapter),
                    *(_counted(scale) if number == _STREAMS else _timed(scale)),
                    "--connections=1",
                    f"--streams={number}",
                )
            )
            for number in scale.connections
        }


def copying_proxy(scale: Scale) -> Json:
    """The same small requests through a proxy that only copies: what the machine asks for."""
    with stack() as adapter:
        found: Json = {}
        for lane, address, args in (
            ("rest", adapter.http_address, ("--protocol=v2-json", f"--connections={_STREAMS}")),
            ("grpc", adapter.grpc_address, ("--connections=1", f"--streams={_STREAMS}")),
        ):
            scheme = "http" if lane == "rest" else "grpc"
            with copying(address) as (proxy, pid):
                result = load(
                    f"{scheme}://{proxy}",
                    "--model=identity",
                    f"--compare={scheme}://{address}",
                    f"--metadata=grpc://{adapter.grpc_address}",
                    f"--cpu-pid={pid}",
                    *args,
                    *_counted(scale),
                )
            found[lane] = compared(result)
        return found


def payloads(scale: Scale) -> Json:
    """Binary tensors at 4 connections, by their size; the largest has a row of its own."""
    with stack() as adapter:
        found: Json = {"rest": {}, "grpc": {}}
        for floats in (*scale.floats, _FLOATS_OF_4_MIB):
            shared = (*_timed(scale, 0.5), f"--shape=IN={floats}", f"--connections={_BIG_CALLERS}")
            for lane, at in (("rest", (*_rest(adapter), *_BINARY)), ("grpc", _grpc(adapter))):
                found[lane][str(4 * floats)] = compared(load(*at, *shared))
        return found


def memory_of_big_bodies(scale: Scale) -> Json:
    """The peak of the adapter's resident memory while 32 callers send 25 MiB each, over idle."""
    return {lane: _growth(lane, scale) for lane in ("rest", "grpc")}


def _growth(lane: str, scale: Scale) -> Json:
    rounds = []
    for _ in range(scale.slow_rounds):
        with stack(*_ROOM) as adapter:
            at = (*_rest(adapter), "--protocol=sagemaker-binary")
            if lane == "grpc":
                at = _grpc(adapter)
            target = [arg for arg in at if not arg.startswith("--compare")]
            warm = load(*target, "--count=200", "--connections=32", "--warmup=0")
            pid = adapter.process.pid
            idle = rss_bytes(pid)
            forget_peak(pid)
            big = (f"--shape=IN={_FLOATS_OF_25_MIB}", f"--connections={_CALLERS}", "--warmup=0")
            result = load(*target, *big, f"--count={scale.slow_rounds * _CALLERS}", "--timeout=120")
            rounds.append(
                {
                    "idle": idle / MIB,
                    "growth": (rss_bytes(pid, "VmHWM") - idle) / MIB,
                    "errors": result["targets"][0]["errors"] + warm["targets"][0]["errors"],
                    "answered": result["targets"][0]["answered"],
                }
            )
    return {
        "growth_mib": spread(each["growth"] for each in rounds),
        "idle_mib": spread(each["idle"] for each in rounds),
        "errors": sum(each["errors"] for each in rounds),
        "answered": sum(each["answered"] for each in rounds),
    }


def generator(scale: Scale) -> Json:
    """The load tester's own ceiling, at a server that answers at once."""
    with running() as triton:
        shared = ("--model=m0", "--warmup=0.5", f"--duration={scale.seconds}")
        found = {}
        for number in scale.connections:
            args = (f"--connections={number}", "--protocol=v2-json", *shared)
            found[str(number)] = side(load(f"http://{triton.http}", *args)["targets"][0])
        return found

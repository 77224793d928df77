"""The endpoint beside a cache by count, in front of the same models and callers."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.counted import CountedLru
from tests.benchmarks.figures import Json, of, over, quantile, spread
from tests.benchmarks.place import MIB, FailedError, Scale
from tests.running import COMPLETE, Client, embedded_adapter
from tests.trees import CONFIG, infer_body, write_python_model

MODELS, TENTH = 40, 10
_SIZES = (32, 64, 128, 256)  # MiB, as many models of each
_SEED = 18
_ZIPF = 1.2  # the k-th model is asked for k**-_ZIPF times as often as the first
_TRIES = 3  # as boto3 has it
_NO_READING = ("--memory-source=off", "--memory-reserve=0")

# One call of a model; True if it was loaded.
Ask = Callable[[Client, str], bool]


@dataclass(frozen=True, slots=True)
class Play:
    """`seconds`: of each side in each round."""

    rounds: int
    seconds: float
    callers: int


_FULL, _QUICK = Play(3, 12.0, 6), Play(1, 0.5, 2)


@dataclass(frozen=True, slots=True)
class Models:
    """A folder with a package for each model, and what each declares to take in memory."""

    folder: Path
    bytes_of: Mapping[str, int]

    @property
    def room(self) -> int:
        return sum(self.bytes_of.values()) // TENTH


def write_models(folder: Path) -> Models:
    """Sizes have nothing to do with how often a model is asked for."""
    sizes = [_SIZES[number % len(_SIZES)] * MIB for number in range(MODELS)]
    random.Random(_SEED).shuffle(sizes)
    bytes_of = {f"m{number:02}": size for number, size in enumerate(sizes)}
    for name, size in bytes_of.items():
        declared = f'parameters {{ key: "memory_bytes" value {{ string_value: "{size}" }} }}\n'
        write_python_model(folder / name, config=CONFIG + declared)
    return Models(folder, bytes_of)


def mix(scale: Scale, folder: Path) -> Json:
    """The same callers ask both for the same models, one after the other for so long."""
    models = write_models(folder / "mix")
    play = _QUICK if scale.is_quick else _FULL
    found: dict[str, list[Json]] = {"endpoint": [], "lru": []}
    most = []
    with _endpoint(models, folder / "cache") as one, _counted(models) as (other, sizes):
        sides = {"endpoint": one, "lru": other}
        for side in sides.values():
            _fill(*side, models)
        for number in range(play.rounds):
            del sizes[:-1]
            for name in list(sides)[:: -1 if number % 2 else 1]:
                found[name].append(_played(*sides[name], models, play, number))
            most.append(max(sizes) / models.room)
    return {
        "p99_ratio": over(found, "p99", "endpoint", "lru"),
        "lru_most": spread(most, 100),
        **{f"{name}_calls": of(found, name, "calls") for name in found},
        **{f"{name}_hits": of(found, name, "hits", 100) for name in found},
        **{f"{name}_p50": of(found, name, "p50", 1e3) for name in found},
        **{f"{name}_p99": of(found, name, "p99") for name in found},
    }


@contextmanager
def _endpoint(models: Models, cache: Path) -> Iterator[tuple[str, Ask]]:
    flags = (f"--model-store={models.folder}", f"--cache-dir={cache}")
    room = (*_NO_READING, f"--memory-limit={models.room}")
    with embedded_adapter(*flags, *room, COMPLETE) as adapter:
        yield adapter.http, _ask_endpoint


def _ask_endpoint(client: Client, name: str) -> bool:
    headers = {"X-Amzn-SageMaker-Target-Model": name}
    for _ in range(_TRIES):
        reply = client.post("/endpoints/any/invocations", infer_body(0.5), headers)
        if reply.status == 200:
            return reply.headers["X-Triton-Adapter-Cache"] == "hit"
        if reply.status != 503:
            break
        time.sleep(int(reply.headers.get("x-amz-retry-after", "0")) / 1e3)
    raise FailedError(f"a call of the endpoint: {reply.status} {reply.body!r}")


@contextmanager
def _counted(models: Models) -> Iterator[tuple[tuple[str, Ask], list[int]]]:
    """The cache by count, and what its models took at each load: it knows nothing of the room."""
    with ExitStack() as opened:
        adapter = opened.enter_context(
            embedded_adapter(f"--model-roots={models.folder}", *_NO_READING, COMPLETE)
        )
        control = opened.enter_context(closing(adapter.client()))  # under the lock of the cache
        sizes: list[int] = []

        def load(name: str) -> None:
            _well("load", control.load(name, models.folder / name).status)
            sizes.append(sum(models.bytes_of[each] for each in (*lru.models, name)))

        def unload(name: str) -> None:
            _well("unload", control.delete(f"/models/{name}").status)

        lru = CountedLru(MODELS // TENTH, load, unload)

        def ask(client: Client, name: str) -> bool:
            was_there = lru.use(name)
            while (status := client.post(f"/models/{name}/invoke", infer_body(0.5)).status) == 404:
                lru.use(name)  # it was unloaded before the call came
            _well("call", status)
            return was_there

        yield (adapter.http, ask), sizes


def _well(what: str, status: int) -> None:
    if status != 200:
        raise FailedError(f"a {what} in the cache by count: {status}")


def _fill(address: str, ask: Ask, models: Models) -> None:
    """Until there is no more room."""
    with closing(Client(address)) as client:
        for name in list(models.bytes_of)[: MODELS // TENTH]:
            ask(client, name)


def _played(address: str, ask: Ask, models: Models, play: Play, number: int) -> Json:
    """What all callers saw in one round. Calls that have begun are answered."""
    end = time.monotonic() + play.seconds
    names = list(models.bytes_of)
    weights = [rank**-_ZIPF for rank in range(1, len(names) + 1)]

    def call(caller: int) -> list[tuple[float, bool]]:
        dice = random.Random(f"{_SEED} {number} {caller}")
        seen = []
        with closing(Client(address)) as client:
            while time.monotonic() < end or not seen:
                [name] = dice.choices(names, weights)
                begun = time.perf_counter()
                was_there = ask(client, name)
                seen.append((time.perf_counter() - begun, was_there))
        return seen

    with ThreadPoolExecutor(play.callers) as callers:
        calls = [each for seen in callers.map(call, range(play.callers)) for each in seen]
    times = [took for took, _ in calls]
    return {
        "calls": len(calls),
        "hits": sum(was_there for _, was_there in calls) / len(calls),
        "p50": quantile(times, 0.5),
        "p99": quantile(times, 0.99),
    }

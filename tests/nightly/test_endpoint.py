"""Two hundred models in a store, room for ten, sixteen callers with boto3, and an oracle.

Some models are asked for much more often than others (Zipf). Each answers with a number of its own,
and with the version of the archive that it came from, so that an answer of another model, or of a
version that the store never had, is seen. In one play all is well; in the second the store cuts,
stalls, lies and changes archives amid downloads, and adapter and Triton are killed. In the third
the adapter is restarted while the store is away, after renewals, rollbacks and deletions: it must
serve the version that the store named last, or none.
"""

import asyncio
import io
import json
import os
import random
import signal
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest
import tritonclient.grpc as grpcclient
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.asking import quoted
from tests.ports import free_ports
from tests.processes import tritonserver
from tests.running import COMPLETE, EMBEDDED, Client, RunningAdapter, wait_until
from tests.store.web import (
    Answer,
    Page,
    Serve,
    WebServer,
    cut_after,
    says_more,
    status,
    web_server,
    well,
    whole_instead_of_a_part,
)
from tests.trees import CONFIG, infer_body, write_python_model

pytestmark = pytest.mark.triton

_MODELS, _ROOM, _CALLERS = 200, 10, 16
_MIB = 2**20
_EACH = 40 * _MIB
_CACHE_LIMIT = 3 * _MIB  # of some 200 folders of 25 KiB on disk: not all of them
_VERSION = 1000.0  # the answer is x + the model's number + 1000 x the archive's version
_DECLARED = f'parameters {{ key: "memory_bytes" value {{ string_value: "{_EACH}" }} }}\n'
_ABSENT, _BROKEN = "no-such-model.tar.gz", "broken.tar.gz"
# What a caller may be told where the endpoint has too much to do, and where parts of it are killed.
_BUSY = {"ServiceUnavailable", "ModelNotReadyException"}
_KILLED = {*_BUSY, "ModelError", "InternalFailure"}


def key_of(number: int) -> str:
    return f"team-{number % 7}/model-{number}.tar.gz"


def archive(number: int, version: int, scratch: Path) -> bytes:
    folder = scratch / f"{number}-{version}"
    padding = random.Random(number).randbytes(20_000)  # so that a download can be cut amid it
    write_python_model(
        folder,
        answer=f"values = values + {number} + {_VERSION * version}",
        config=CONFIG + _DECLARED,
    )
    (folder / "1" / "weights.bin").write_bytes(padding)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        tar.add(folder, ".")
    return packed.getvalue()


@dataclass
class Store:
    """The web server with all archives; `versions` is how many each has had."""

    server: WebServer
    loop: asyncio.AbstractEventLoop
    versions: dict[int, int] = field(default_factory=dict)


class Trouble(list[Serve]):
    """What is done with the next GETs: mostly nothing odd, or any kind of trouble."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self._dice = dice

    def __bool__(self) -> bool:
        return True

    def pop(self, _: object = 0) -> Serve:  # type: ignore[override]
        if self._dice.random() > 0.3:
            return well
        odd = (cut_after(3000), cut_after(0), says_more(10), status(500), status(503, "SlowDown"))
        return self._dice.choice((*odd, whole_instead_of_a_part, slow))


async def slow(answer: Answer) -> Any:
    response = await answer.begin()
    for begun in range(0, len(answer.rest), 8000):
        await response.write(answer.rest[begun : begun + 8000])
        await asyncio.sleep(0.2)
    return response


@contextmanager
def store(scratch: Path) -> Iterator[Store]:
    """Run the server on an event loop of its own."""
    started: list[Store] = []
    is_up, is_over = threading.Event(), asyncio.Event()

    async def run() -> None:
        async with web_server() as server:
            for number in range(_MODELS):
                server.pages[f"/models/{key_of(number)}"] = Page(archive(number, 0, scratch))
            server.pages[f"/models/{_BROKEN}"] = Page(b"this is no archive")
            versions = dict.fromkeys(range(_MODELS), 0)
            started.append(Store(server, asyncio.get_running_loop(), versions))
            is_up.set()
            await is_over.wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert is_up.wait(60)
    try:
        yield started[0]
    finally:
        started[0].loop.call_soon_threadsafe(is_over.set)
        thread.join(30)


@dataclass
class Tally:
    """What callers were told, by kind; `faults` is what must never be."""

    told: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


class Play:
    """Callers, an adapter that may be replaced by another at the same port, and its end."""

    def __init__(
        self, store: Store, place: Path, seed: int, allowed: set[str], *flags: str
    ) -> None:
        self.store = store
        self._flags = flags
        self.tally = Tally()
        self.is_over = threading.Event()
        self._seed = seed
        self._allowed = allowed
        self._turn = threading.Lock()
        [self._port] = free_ports(1)
        self.cache = place / "cache"
        self.adapter = self.start()

    def start(self) -> RunningAdapter:
        adapter = RunningAdapter(
            *EMBEDDED,
            COMPLETE,
            f"--http=127.0.0.1:{self._port}",
            f"--model-store={self.store.server.url}/models/",
            f"--cache-dir={self.cache}",
            f"--cache-limit={_CACHE_LIMIT}",
            "--memory-source=off",
            f"--memory-limit={_ROOM * _EACH}",
            "--memory-reserve=0",
            "--unload-timeout-seconds=30",
            "--unload-stall-seconds=3",
            *self._flags,
        )
        adapter.wait_for("adapter.started")
        return adapter

    def call(self, number: int) -> None:
        """Be one caller until the play is over."""
        dice = random.Random(self._seed * 100 + number)
        weights = [1 / (rank + 1) for rank in range(_MODELS)]
        settings = Config(retries={"total_max_attempts": 1}, read_timeout=90)
        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "y", "region_name": "us-east-1"}
        url = f"http://127.0.0.1:{self._port}"
        with self._turn:  # making clients is not safe for threads
            client = boto3.client("sagemaker-runtime", endpoint_url=url, config=settings, **keys)
        while not self.is_over.is_set():
            odd = dice.random()
            [model] = dice.choices(range(_MODELS), weights)
            target = _ABSENT if odd < 0.01 else _BROKEN if odd < 0.02 else key_of(model)
            begun = time.monotonic()
            kind = self._asked(client, target, model, float(dice.randrange(1000)))
            with self._turn:
                self.tally.told[kind] += 1
                self.tally.waits.append(time.monotonic() - begun)

    def _asked(self, client: Any, target: str, model: int, value: float) -> str:
        tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [value]}
        body, is_good = json.dumps({"inputs": [tensor]}), target not in {_ABSENT, _BROKEN}
        highest = self.store.versions[model]
        try:
            answer = client.invoke_endpoint(
                EndpointName="any", TargetModel=target, ContentType="application/json", Body=body
            )
            [found] = json.loads(answer["Body"].read())["outputs"][0]["data"]
        except ClientError as error:
            return self._refused(error, target, is_good=is_good)
        except BotoCoreError as error:  # the adapter is gone, or was killed amid the answer
            if "InternalFailure" not in self._allowed:
                self._blame(f"{target}: {error!r}")
            time.sleep(0.2)
            return type(error).__name__
        highest = max(highest, self.store.versions[model])
        right = {value + model + _VERSION * version for version in range(highest + 1)}
        if not is_good or found not in right:
            self._blame(f"{target} of {value} was answered {found}; right are {sorted(right)}")
        return answer["ResponseMetadata"]["HTTPHeaders"].get("x-triton-adapter-cache", "?")

    def _refused(self, error: ClientError, target: str, *, is_good: bool) -> str:
        code = error.response["Error"]["Code"]
        expected = self._allowed if is_good else {*self._allowed, "ValidationError"}
        if code not in expected:
            self._blame(f"{target}: {error}")
        return code

    def _blame(self, text: str) -> None:
        with self._turn:
            self.tally.faults.append(text)

    def run(self, seconds: float, disturb: "Disturbance | None" = None) -> None:
        callers = [threading.Thread(target=self.call, args=(each,)) for each in range(_CALLERS)]
        for each in callers:
            each.start()
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if disturb is not None:
                disturb(self)
            self.is_over.wait(min(left, 1))
        self.is_over.set()
        for each in callers:
            each.join(120)
        assert not any(each.is_alive() for each in callers), "a call is never answered"


class Disturbance:
    """Changes archives, kills Triton, kills the adapter: one of them now and then."""

    def __init__(self, dice: random.Random, scratch: Path, seconds: float) -> None:
        self._dice = dice
        self._scratch = scratch
        third = seconds / 3
        self._kills = [(third, self._kill_triton), (2 * third, self._kill_adapter)]
        self._begun = time.monotonic()

    def __call__(self, play: Play) -> None:
        self._change_one(play.store)
        if self._kills and time.monotonic() - self._begun > self._kills[0][0]:
            self._kills.pop(0)[1](play)

    def _change_one(self, store: Store) -> None:
        model = self._dice.randrange(_MODELS)
        version = store.versions[model] + 1
        page = Page(archive(model, version, self._scratch), f'"{version + 1}"')
        store.versions[model] = version  # first: no answer may come before it is known
        store.loop.call_soon_threadsafe(
            store.server.pages.__setitem__, f"/models/{key_of(model)}", page
        )

    def _kill_triton(self, play: Play) -> None:
        os.kill(tritonserver(play.adapter), signal.SIGKILL)
        play.adapter.wait_for("triton.restarted", 60)

    def _kill_adapter(self, play: Play) -> None:
        repository = play.adapter.repository
        play.adapter.stop(signal.SIGKILL)
        play.adapter = play.start()
        wait_until(lambda: not repository.exists(), 30, "the next run removes what the last left")


def check_rest(play: Play) -> None:
    """Ledger, Triton's index and the disk agree, and all is within its limit."""

    def is_at_rest() -> bool:
        models = play.adapter.state()["models"]
        return all(each["state"] == "READY" and not each["in_flight"] for each in models)

    wait_until(is_at_rest, 60, "no load and no request is under way")
    state = play.adapter.state()
    ready = {each["model_id"] for each in state["models"]}
    assert 0 < len(ready) <= _ROOM
    assert all(sum(each["bytes"].values()) == _EACH for each in state["models"])
    with closing(grpcclient.InferenceServerClient(play.adapter.grpc_address)) as triton:
        index = triton.get_model_repository_index(as_json=True).get("models", [])
    in_triton = [each["name"] for each in index if each.get("state") == "READY"]
    assert len(in_triton) == len(ready)
    files = [path for path in play.cache.rglob("*") if path.is_file()]
    assert sum(path.stat().st_blocks * 512 for path in files) <= _CACHE_LIMIT * 1.1
    assert not [path for path in files if "part" in path.name], "a download was left"


def report(play: Play, seconds: float) -> None:
    told, waits = play.tally.told, sorted(play.tally.waits)
    total = sum(told.values())
    print(f"\n{total} calls in {seconds:.0f} s: {dict(told.most_common())}")  # noqa: T201
    for share in (0.5, 0.9, 0.99):
        print(f"p{100 * share:g} {waits[int(share * (len(waits) - 1))] * 1000:.1f} ms")  # noqa: T201


def finish(play: Play) -> None:
    """Stop, whatever was found before."""
    adapter = play.adapter
    try:
        assert play.tally.faults == []
        check_rest(play)
    finally:
        code = adapter.stop()
    assert code == 0, adapter.errors
    assert not adapter.repository.exists()


def test_every_answer_is_right_while_models_come_and_go(
    seconds: float, seed: int, tmp_path: Path
) -> None:
    with store(tmp_path / "archives") as served:
        play = Play(served, tmp_path, seed, _BUSY)
        play.run(seconds / 2)
        report(play, seconds / 2)
        finish(play)
    told = play.tally.told
    assert min(told["hit"], told["miss"]) > 0
    assert told["disk"] > 0, "evicted models came back without a download"


def test_every_answer_is_right_though_the_store_lies_and_parts_are_killed(
    seconds: float, seed: int, tmp_path: Path
) -> None:
    dice = random.Random(seed)
    with store(tmp_path / "archives") as served:
        served.server.script = Trouble(dice)
        play = Play(served, tmp_path, seed, _KILLED)
        play.run(seconds / 2, Disturbance(dice, tmp_path / "archives", seconds / 2))
        report(play, seconds / 2)
        finish(play)
    assert play.tally.told["hit"] > 0


class Outages:
    """Gives models other versions, and restarts the adapter while the store is away."""

    def __init__(self, play: Play, dice: random.Random, scratch: Path) -> None:
        self._play = play
        self._dice = dice
        self._scratch = scratch
        self._pages: dict[int, list[Page]] = {}  # all that the store ever had, by model
        self.last: dict[int, int | None] = {}  # the version that the store named; None: no key
        self.count: Counter[str] = Counter()

    def change(self) -> None:
        """Renew, roll back or delete a model, and have the adapter ask the store for it."""
        known = sorted(self._pages)
        is_new = len(known) < 3 or self._dice.random() < 0.3
        model = self._dice.randrange(_MODELS) if is_new else self._dice.choice(known)
        pages = self._pages.setdefault(model, [])
        was_deleted = self.last.get(model, 0) is None
        is_loaded = bool(pages) and not was_deleted and self._dice.random() < 0.5
        if is_loaded:  # so that the old version is in use until after the new one came
            assert self.call(model)[0] == 200
        act = "renewed"
        if len(pages) > 1:
            act = self._dice.choice(["renewed", "rolled back", "deleted"])
        if act == "renewed":
            version = len(pages)
            pages.append(Page(archive(model, version, self._scratch), f'"{version + 1}"'))
            self._put(model, version)
        elif act == "rolled back":
            self._put(model, self._dice.randrange(len(pages) - 1))
        else:
            self._put(model, None)
        if is_loaded and act != "deleted":
            wait_until(lambda: self.call(model)[1] == self.last[model], 60, "the renewal")
        if was_deleted and act != "deleted":  # a missing key is not asked for again at once
            wait_until(lambda: self.ask(model)[0] == 200, 30, f"model {model} is back")
        expected = (400, None) if self.last[model] is None else (200, self.last[model])
        answer = self.call(model) if is_loaded and act != "deleted" else self.ask(model)
        assert answer == expected, f"model {model} was {act}"
        self.count[act] += 1

    def _put(self, model: int, version: int | None) -> None:
        path, server = f"/models/{key_of(model)}", self._play.store.server
        if version is None:
            change = partial(server.pages.pop, path, None)
        else:
            change = partial(server.pages.__setitem__, path, self._pages[model][version])
        self._play.store.loop.call_soon_threadsafe(change)
        self.last[model] = version

    def ask(self, model: int) -> tuple[int, int | None]:
        """Load the model anew; return the status, and the version that answers."""
        with closing(self._play.adapter.client()) as client:
            assert client.delete(f"/models/{quoted(key_of(model))}").status in {200, 404}
        return self.call(model)

    def call(self, model: int) -> tuple[int, int | None]:
        with closing(self._play.adapter.client()) as client:
            reply = client.post(
                "/endpoints/any/invocations",
                infer_body(0.0),
                {"X-Amzn-SageMaker-Target-Model": key_of(model)},
            )
        if reply.status != 200:
            return reply.status, None
        [found] = reply.json()["outputs"][0]["data"]
        return 200, round((found - model) / _VERSION)

    def break_off(self) -> None:
        """Have the store away for a while, mostly restart the adapter meanwhile, and see what each
        model answers.
        """
        play = self._play
        play.store.server.is_away = True
        end = self._dice.choice([signal.SIGKILL, signal.SIGTERM, None])
        if end is not None:
            play.adapter.stop(end)
            play.adapter = play.start()
        for model, last in self.last.items():
            answer = self.ask(model)
            right = {(503, None)} if last is None else {(200, last), (503, None)}
            assert answer in right, f"model {model}: {answer}, and the store named {last} last"
            self.count["served in an outage"] += answer[0] == 200
        play.store.server.is_away = False
        with closing(Client(play.adapter.admin)) as admin:
            wait_until(lambda: b"store" not in admin.get("/readyz").body, 60, "the store is back")
        self.count["outages"] += 1


def test_an_outage_serves_only_the_version_named_last(
    seconds: float, seed: int, tmp_path: Path
) -> None:
    dice = random.Random(seed)
    with store(tmp_path / "archives") as served:
        play = Play(
            served, tmp_path, seed, _BUSY, "--store-timeout-seconds=2", "--revalidate-seconds=0.2"
        )
        outages = Outages(play, dice, tmp_path / "changed")
        end = time.monotonic() + seconds / 2
        try:
            while time.monotonic() < end or not outages.count["outages"]:
                for _ in range(10):
                    outages.change()
                outages.break_off()
        finally:
            code = play.adapter.stop()
        print(f"\n{dict(outages.count)}")  # noqa: T201
    assert code == 0, play.adapter.errors
    assert outages.count["served in an outage"] > 0

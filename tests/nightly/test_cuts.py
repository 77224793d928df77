"""Connections cut at random moments, on both sides of the real command, under load.

Every answer that arrives is the right one; nobody waits in vain; who was not cut is answered, and
nothing is left behind. Triton 2.51 itself dies of its gRPC connections being cut, after minutes
(SIGSEGV), so these are left alone unless LANE_CUT_TRITONS=1.
"""

import asyncio
import contextlib
import os
import sys
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.grpc_calls import calls_to
from tests.journeys.memory.models import metric
from tests.nightly.cut_callers import MODEL, Books, Grpc, Rest
from tests.nightly.cutting import KINDS, NEVER, Relay, relay_to
from tests.running import COMPLETE, RunningAdapter, embedded_adapter, wait_until
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

SPARES, SPARED = not os.environ.get("LANE_CUT_TRITONS"), "triton grpc"
CALLERS = 4  # of each kind
CHANNELS = 2  # to Triton's gRPC port: what controls it, and what is not passed on as it is
SLICE_SECONDS = 1.5
GROWTH_BYTES = 48 * 2**20
# bytes of one direction, after which the cut comes: at once, within a head, within a body
MOMENTS = (0, 0, 30, 200, 2_000, 100_000, 300_000)


class Storm:
    """The adapter between relays, and who asks it."""

    def __init__(self, adapter: RunningAdapter, http: Relay, grpc: Relay, books: Books) -> None:
        self.adapter = adapter
        self.behind = [http, grpc]
        self.before: list[tuple[str, Relay]] = []
        self.books = books

    async def blow(self, seconds: float) -> None:
        """In turns before the adapter, behind it and on both sides."""
        before = [relay for _, relay in self.before]
        behind = self.behind[:1] if SPARES else self.behind
        sides = (before, behind, before + behind)
        turns = max(3, int(seconds / SLICE_SECONDS))
        for turn in range(5 * turns):  # chance may leave out a kind for a while
            if self.books.faults or (turn >= turns and set(self.cuts()) == self.kinds):
                return
            await self._turn(sides[turn % 3])
            for relay in before + self.behind:
                for pair in relay.pairs:
                    pair.disarm()

    async def _turn(self, relays: list[Relay]) -> None:
        chance, end = self.books.random, asyncio.get_running_loop().time() + SLICE_SECONDS
        while asyncio.get_running_loop().time() < end:
            pairs = [pair for relay in relays for pair in relay.pairs if pair.done is None]
            if pairs:
                kind, after = chance.choice(KINDS), chance.choice(MOMENTS)
                is_near = chance.random() < 0.5
                after = after and chance.randint(1, after)
                chance.choice(pairs).arm(kind, is_near=is_near, after=after)
            await asyncio.sleep(chance.expovariate(25))

    def cuts(self) -> Counter[str]:
        """By side, listener and kind."""
        sides = {"triton": zip(("http", "grpc"), self.behind, strict=True), "caller": self.before}
        return Counter(
            f"{side} {listener} {cut.kind}"
            for side, relays in sides.items()
            for listener, relay in relays
            for cut in relay.cuts
        )

    @property
    def kinds(self) -> set[str]:
        """All that there are."""
        kinds = {
            f"{a} {b} {c}" for a in ("caller", "triton") for b in ("http", "grpc") for c in KINDS
        }
        return {kind for kind in kinds if not (SPARES and kind.startswith(SPARED))}

    def check_counts(self) -> None:
        """A cut costs no more than the one request that was on the connection; over grpc also the
        next one, which a busy client may begin on a connection whose end it has not read yet.
        """
        cuts, seen = self.cuts(), self.books.seen
        for listener in ("http", "grpc"):
            of_caller, of_triton = (
                sum(cuts[f"{side} {listener} {kind}"] for kind in KINDS)
                for side in ("caller", "triton")
            )
            assert seen[f"{listener} answered"]
            assert seen[f"{listener} lost"] <= of_caller * (2 if listener == "grpc" else 1), (
                listener
            )
            assert seen[f"{listener} unavailable"] <= of_triton, listener
        assert set(cuts) == self.kinds


@asynccontextmanager
async def storm_before(triton: RunningAdapter, root: Path, seed: int):
    """Callers are there, each behind a relay of its own, and have not begun."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(relay_to(triton.http_address))
        grpc = await stack.enter_async_context(relay_to(triton.grpc_address))
        adapter = RunningAdapter(
            *("--triton=external", "--staging=upload", "--memory-source=off"),
            *("--http=127.0.0.1:0", "--admin=127.0.0.1:0", "--grpc-data=127.0.0.1:0"),
            *(f"--triton-http={http.address}", f"--triton-grpc={grpc.address}"),
            f"--model-roots={root}",
        )
        stack.push_async_callback(asyncio.to_thread, adapter.stop)
        await asyncio.to_thread(load, adapter, root)
        yield Storm(adapter, http, grpc, Books(seed))


def load(adapter: RunningAdapter, root: Path) -> None:
    adapter.wait_for("adapter.started")
    client = adapter.client()
    reply = client.load(MODEL, write_python_model(root / MODEL))
    client.close()
    assert reply.status == 200, reply.body


async def callers_of(storm: Storm, stack: AsyncExitStack) -> list[Rest | Grpc]:
    http, grpc = storm.behind
    callers: list[Rest | Grpc] = []
    for _ in range(CALLERS):
        for kind, listener, behind in ((Rest, "http", http), (Grpc, "grpc_data", grpc)):
            own = await stack.enter_async_context(relay_to(storm.adapter.listeners[listener]))
            storm.before.append((kind.kind, own))
            callers.append(kind(storm.books, own, behind))
    return callers


async def play(triton: RunningAdapter, root: Path, seconds: float, seed: int) -> None:
    async with storm_before(triton, root, seed) as storm, AsyncExitStack() as stack:
        adapter, books = storm.adapter, storm.books
        await asyncio.to_thread(ask_each_listener, adapter)
        at_rest = sockets_of(adapter, storm.behind)
        async with asyncio.TaskGroup() as group:
            for caller in await callers_of(storm, stack):
                group.create_task(caller.run())
            await storm.blow(SLICE_SECONDS * 3)
            begun_with = resident_bytes(adapter)
            await storm.blow(seconds)
            books.is_over = True
        cuts, grown = storm.cuts(), resident_bytes(adapter) - begun_with
        told = f"seed {seed}, cuts {dict(cuts)}, answers {dict(books.seen)}, grown {grown}"
        sys.stdout.write(f"{told}\n")
        assert not triton.events("triton.exited"), f"{told}: Triton itself ended"
        assert not books.faults, f"{told}: {len(books.faults)} faults, {books.faults[:10]}"
        storm.check_counts()
        assert grown < GROWTH_BYTES, told
        await asyncio.to_thread(check_rest, storm, at_rest)
        relays = [relay for _, relay in storm.before] + storm.behind
        assert not [cut for relay in relays for cut in relay.cuts if cut.ended == NEVER]


def check_rest(storm: Storm, at_rest: int) -> None:
    adapter = storm.adapter
    ask_each_listener(adapter)
    for frontend in ("sagemaker", "v2", "grpc_data"):
        line = f'triton_adapter_requests_in_flight{{frontend="{frontend}"}}'
        wait_until(lambda line=line: metric(adapter, line) == 0, 60, f"{line} is 0")
    assert [model["in_flight"] for model in adapter.state()["models"]] == [0]
    http, grpc = storm.behind
    wait_until(lambda: sockets_of(adapter, storm.behind) == at_rest, 60, f"{at_rest} sockets")
    # a caller who has been cut asks again while Triton still works on what it asked before
    wait_until(lambda: len(http.pairs) <= 2 * CALLERS, 60, "no connection that is not kept")
    wait_until(lambda: len(grpc.pairs) <= CHANNELS, 60, "no connection but the channels'")
    client = adapter.client()
    assert client.delete(f"/models/{MODEL}").status == 200
    client.close()
    traces = [line for line in adapter.events("request.failed") if "exception" in line]
    assert traces == []


def ask_each_listener(adapter: RunningAdapter) -> None:
    client = adapter.client()
    for path in (f"/models/{MODEL}/invoke", f"/v2/models/{MODEL}/infer"):
        reply = client.post(path, infer_body(1, 2))
        assert reply.status == 200, reply.body
        assert reply.json()["outputs"][0]["data"] == [1, 2]
    client.close()
    with calls_to(adapter.listeners["grpc_data"]) as calls:
        assert calls.infer(MODEL, 3, 4) == [3, 4]


def sockets_of(adapter: RunningAdapter, but_to: list[Relay]) -> int:
    """All sockets of the process but those that lead to Triton."""
    proc = Path("/proc", str(adapter.process.pid))
    ports = {int(relay.address.rsplit(":", 1)[1]) for relay in but_to}
    tables = ((proc / "net" / name).read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    kept = {f"socket:[{row[9]}]" for row in rows if int(row[2].rsplit(":", 1)[1], 16) in ports}
    found = set()
    for link in (proc / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(link.readlink()))
    return len({name for name in found if name.startswith("socket:")} - kept)


def resident_bytes(adapter: RunningAdapter) -> int:
    pages = Path("/proc", str(adapter.process.pid), "statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


def test_whoever_is_not_cut_is_answered_and_nothing_stays(seconds, seed, tmp_path):
    """The relays need asyncio's own loop: uvloop reads on after `pause_reading`."""
    with (
        embedded_adapter(COMPLETE) as triton,
        asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner,
    ):
        runner.run(play(triton, tmp_path, seconds, seed))

"""Plays random loads, calls, unloads, updates and mishaps, and judges each play by an oracle.

python -m tests.next.control.random_play FIRST COUNT    # plays seeds, and shows those that fail
"""

import asyncio
import logging
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

from adapter.core.model import ModelId, ModelSource
from adapter.errors import AdapterError, InferenceFailed
from adapter.next.control.models import Replaces, RoomMaker
from adapter.next.control.ports import StoreSettings
from adapter.next.core.blame import Requester
from adapter.next.core.record import OnExit
from adapter.next.core.states import ModelState
from tests.next.control.fakes import GPU, OTHER_GPU, Script
from tests.next.control.stage import Stage
from tests.simulation.loop import Draws, virtual

_PLAY_SECONDS = 300.0
# The longest chain: a load up to its limit, its undo, the way back of an update, and as much of
# another operation of the model before it.
_BOUND_SECONDS = 2000.0
_FOLDERS = ("p0", "p1", "p2", "p3")
_STORE_KEYS = ("s0", "s1", "s2", "s3", "s4")
_BUGS = {"operation.failed", "task.failed", "task.ended"}


class _BugCollector(logging.Handler):
    """Collects the lines of the log that report a bug."""

    def __init__(self) -> None:
        super().__init__()
        self.bugs: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line if it reports a bug."""
        if record.msg in _BUGS:
            error = record.exc_info[1] if record.exc_info else None
            lines = traceback.format_exception(error) if error else []
            self.bugs.append(f"{record.msg} {''.join(lines)[-3000:]}")


class Play:
    """One random play: callers and mishaps on a stage."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.pending: dict[asyncio.Task[None], str] = {}
        self.names = [ModelId(f"m{number}") for number in range(4)]
        self.keys = [ModelId(key) for key in _STORE_KEYS]
        self.stage = self._make_stage()

    def _make_stage(self) -> Stage:
        random = self.random
        is_embedded = random.random() < 0.8
        self.devices = random.choice((1, 1, 2))
        scripts = {folder: self._draw_script() for folder in _FOLDERS}
        for key in _STORE_KEYS:
            for version in range(1, 7):
                scripts[f"{key}@{version}"] = self._draw_script()
        settings = StoreSettings(
            pin=random.choice(((), ("s0",))),
            policy=random.choice(("cost", "lru")),
            idle_unload_seconds=random.choice((0.0, 0.0, 40.0)),
            revalidate_seconds=random.choice((0.0, 20.0)),
        )
        stage = Stage(
            scripts,
            limit_mib=random.choice((None, None, 900)),
            devices=self.devices,
            on_exit=random.choice((OnExit.RELOAD, OnExit.FORGET, None)),
            load_seconds=random.choice((40.0, 100.0)),
            is_embedded=is_embedded,
            places_gpus=random.random() < 0.5,
            stores=settings,
            load_threads=random.choice((1, 2, 4)),
        )
        stage.triton.lag_seconds = random.choice((0.0, 0.0, 3.0))
        stage.store.disk_limit = random.choice((None, None, 4))
        return stage

    def _draw_script(self) -> Script:
        random = self.random
        size = random.choice((60, 100, 200, 300, 400, 600, 900, 1200))
        sizes: int | dict = size
        gpus: frozenset[int] | None = frozenset({0})
        is_open = False
        if self.devices == 2:
            kind = random.random()
            if kind < 0.3:
                sizes = {OTHER_GPU: size}
                gpus = frozenset({1})
            elif kind < 0.5:
                sizes = {GPU: size // 2, OTHER_GPU: size // 2}
                gpus = None
            elif kind < 0.8 and self.random.random() < 0.5:
                gpus = None
                is_open = True
        is_hanging = random.random() < 0.04
        return Script(
            sizes,
            declared=random.choice((None, None, size, size // 2)),
            files=random.choice((None, size // 4, size)),
            load_seconds=random.choice((0.1, 1.0, 3.0, 10.0)),
            fault="no model file" if random.random() < 0.05 else "",
            failure="bad weights" if random.random() < 0.08 else "",
            load_ends_triton=random.random() < 0.01,
            request_ends_triton=random.random() < 0.01,
            hangs=is_hanging,
            is_python=random.random() < 0.5,
            can_run_beside=random.random() < 0.7,
            request_runs_out=random.random() < 0.03,
            gpus=gpus,
            leaves_gpu_open=is_open,
        )

    # -- what callers do --------------------------------------------------------------------

    async def run(self) -> None:
        """Play, and judge."""
        async with self.stage as stage:
            stage._watcher.cancel()
            loop = asyncio.get_running_loop()
            self._watch_task = asyncio.create_task(self._watch())
            if self.random.random() < 0.5:
                stage.control.desired.want({self.names[0]: ModelSource("p0")})
            end = loop.time() + _PLAY_SECONDS
            while loop.time() < end:
                self._start(self._draw_action())
                await asyncio.sleep(self.random.expovariate(1.5))
                if self.random.random() < 0.02:
                    await self._cause_mishap()
            await self._wait_for_all()
            await self._unload_all()
            self._watch_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch_task
            stage._watcher = asyncio.create_task(asyncio.sleep(0))
            await asyncio.sleep(60)

    def _start(self, action: tuple[str, Callable[[], Awaitable[object]]]) -> None:
        name, act = action
        task = asyncio.create_task(self._do(name, act))
        self.pending[task] = name
        task.add_done_callback(self.pending.pop)
        if self.random.random() < 0.1:
            delay = self.random.expovariate(0.5)
            asyncio.get_running_loop().call_later(delay, task.cancel)

    async def _do(self, name: str, act: Callable[[], Awaitable[object]]) -> None:
        kind = name.split()[0]
        try:
            await act()
        except InferenceFailed as error:
            raise AssertionError(f"{name}: {error}") from error
        except AdapterError as error:
            self.outcomes[f"{kind} {type(error).__name__}"] += 1
        else:
            self.outcomes[f"{kind} ok"] += 1

    def _draw_action(self) -> tuple[str, Callable[[], Awaitable[object]]]:
        random = self.random
        stage = self.stage
        name = random.choice(self.names)
        key = random.choice(self.keys)
        source = ModelSource(random.choice(_FOLDERS))
        seconds = random.choice((0.05, 0.3, 2.0, 8.0))
        on_demand = stage.control.on_demand
        draw = random.random()
        if draw < 0.12:
            maker = random.choice((RoomMaker.ADAPTER, RoomMaker.ADAPTER, RoomMaker.MESH))
            who = random.choice((Requester.PERSON, Requester.PLATFORM))
            return f"load {name}", lambda: stage.models.load(name, source, maker, who)
        if draw < 0.2:
            return f"unload {name}", lambda: stage.models.unload(name)
        if draw < 0.23:
            return f"unload {key}", lambda: stage.models.unload(key)
        if draw < 0.3:
            kind = random.choice(list(Replaces))
            return f"replace {name}", lambda: stage.models.replace(name, source, kind)
        if draw < 0.5:
            return f"invoke {name}", lambda: stage.invoke(name, seconds)
        if draw < 0.58:
            return f"wait {name}", lambda: stage.wait_and_invoke(name)
        if draw < 0.61:
            forced = random.random() < 0.5
            return f"named {key}", lambda: on_demand.load(key, is_forced=forced)
        if draw < 0.64:
            return f"bump {key}", lambda: self._bump(key)
        return f"call {key}", lambda: stage.call(key, seconds, random.choice(("", "x", "y")))

    async def _bump(self, key: ModelId) -> None:
        """Give a model of the store another version."""
        versions = self.stage.store.versions
        versions[key] = min(versions[key] + 1, 5)

    async def _cause_mishap(self) -> None:
        random = self.random
        triton = self.stage.triton
        draw = random.random()
        self.outcomes["mishap"] += 1
        if draw < 0.4:
            triton.exit()
        elif draw < 0.6:
            names = [name for name, model in triton.loaded.items() if model.process]
            if names:
                triton.kill_process_of(random.choice(names))
        elif draw < 0.75 and triton.loaded:
            name = random.choice(list(triton.loaded))
            triton.lose_model(name)
        elif draw < 0.85:
            triton.growth[GPU] += random.choice((50, 100)) * 2**20
        elif self.stage.control.status.server is None and triton.live:
            await triton.disconnect(random.choice((0.5, 5.0)))

    # -- the oracle -------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Hold that what takes requests is loaded, but for a moment after a mishap."""
        missing: Counter[ModelId] = Counter()
        triton = self.stage.triton
        while True:
            present = {
                record.id
                for record in self.stage.control.registry.records()
                if record.state is ModelState.READY and record.name not in triton.loaded
            }
            missing = Counter({one: missing[one] + 1 for one in present})
            worst = max(missing.values(), default=0)
            assert worst < 400, f"{missing} take requests and are not loaded"
            used = triton.used
            growth = max(triton.growth.values(), default=0)
            assert all(n <= triton.device_bytes + growth for n in used.values()), used
            await asyncio.sleep(0.05)

    async def _wait_for_all(self) -> None:
        """Hold that each call ends within a bound."""
        if self.pending:
            tasks = list(self.pending)
            done, late = await asyncio.wait(tasks, timeout=_BOUND_SECONDS)
            names = [self.pending[task] for task in late if task in self.pending]
            assert not late, f"never ended: {names}"
        assert not self._watch_task.done(), self._watch_task.exception()

    async def _unload_all(self) -> None:
        """Unload everything; then the ledger has to be back at zero."""
        stage = self.stage
        for model in stage.control.wanted.models():
            stage.control.wanted.remove(model.model_id)
        for script in stage.triton.scripts.values():
            script.request_ends_triton = False
            script.load_ends_triton = False
        await asyncio.sleep(30)
        for _ in range(3):
            for record in stage.control.registry.records():
                with suppress(AdapterError):
                    await asyncio.wait_for(stage.models.unload(record.id), _BOUND_SECONDS)
        if any(r.state is ModelState.STUCK for r in stage.control.registry.records()):
            stage.triton.exit()
        await asyncio.sleep(200)
        if not stage.control.status.server:
            stage.triton.loaded.clear()  # what a broken connection has left there
        assert not stage.control.registry.records(), stage.control.registry.records()
        ledger = stage.control.ledger
        for device in ledger.devices:
            assert ledger.reserved(device) == 0
            assert ledger.booked(device) == 0
            assert ledger.leaving(device) == 0
        if not stage.control.status.server:
            stage.triton.repository.clear()


def play(seed: int) -> Counter[str]:
    """Play one seed; return the counts of outcomes. Raises what is not as it should be."""
    collector = _BugCollector()
    root = logging.getLogger()
    root.addHandler(collector)
    failures: list[BaseException] = []

    def note(loop: asyncio.AbstractEventLoop, context: dict) -> None:
        error = context.get("exception")
        if error is not None and not isinstance(error, AdapterError):
            failures.append(error)

    async def run() -> Counter[str]:
        asyncio.get_running_loop().set_exception_handler(note)
        one = Play(seed)
        await one.run()
        return one.outcomes

    try:
        with virtual(Draws(seed)) as runner:
            outcomes = runner(run())
    finally:
        root.removeHandler(collector)
        if collector.bugs:
            print(f"seed {seed}: {collector.bugs[0]}", file=sys.stderr)
    assert not collector.bugs, collector.bugs[0]
    assert not failures, repr(failures[0])
    return outcomes


def main() -> int:
    """Play seeds of the command line."""
    first, count = int(sys.argv[1]), int(sys.argv[2])
    logging.getLogger().setLevel(logging.CRITICAL if count > 1 else logging.INFO)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger().addHandler(logging.NullHandler())
    total: Counter[str] = Counter()
    failed: list[int] = []
    for seed in range(first, first + count):
        try:
            total += play(seed)
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:1500]}")
            if count == 1:
                traceback.print_exc()
    print(dict(sorted(total.items())))
    print(f"{count} plays, failed: {failed}")
    return min(1, len(failed))


if __name__ == "__main__":
    sys.exit(main())

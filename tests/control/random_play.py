"""Plays random loads, calls, unloads, updates and mishaps, and judges each play by an oracle.

python -m tests.control.random_play FIRST COUNT    # plays seeds, and shows those that fail
"""

import asyncio
import logging
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

from adapter.control.models import Replaces, RoomMaker
from adapter.control.ports import StoreSettings
from adapter.core.model import ModelId, ModelSource
from adapter.core.record import OnExit
from adapter.core.states import ModelState
from adapter.errors import AdapterError, InferenceFailed
from tests.control.fakes import GPU, OTHER_GPU, Script
from tests.control.stage import Stage
from tests.simulation.loop import Draws, virtual

_PLAY_SECONDS = 300.0
# The longest chain: a load up to its limit, its undo, the way back of an update, and as much of
# another operation of the model before it.
_BOUND_SECONDS = 2000.0
_FOLDERS = ("p0", "p1", "p2", "p3")
_STORE_KEYS = ("s0", "s1", "s2", "s3", "s4")
_VERSIONS = 6
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


Action = tuple[str, Callable[[], Awaitable[object]]]


class Play:
    """One random play: callers and mishaps on a stage."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.pending: dict[asyncio.Task[None], str] = {}
        self.names = [ModelId(f"m{number}") for number in range(4)]
        self.keys = [ModelId(key) for key in _STORE_KEYS]
        # large models and many updates, so that all that is loaded stands in the way of others
        self.is_crowded = self.random.random() < 0.4
        self.stage = self._make_stage()

    def _make_stage(self) -> Stage:
        random = self.random
        is_embedded = random.random() < 0.8
        self.devices = random.choice((1, 1, 2))
        scripts = {folder: self._draw_script() for folder in _FOLDERS}
        for key in _STORE_KEYS:
            for version in range(1, _VERSIONS + 1):
                scripts[f"{key}@{version}"] = self._draw_script()
        settings = StoreSettings(
            pin=random.choice(((), ("s0",))),
            idle_unload_seconds=random.choice((0.0, 0.0, 40.0)),
            revalidate_seconds=3.0 if self.is_crowded else random.choice((0.0, 20.0)),
        )
        stage = Stage(
            scripts,
            limit_mib=random.choice((None, None, 900)),
            devices=self.devices,
            on_exit=random.choice((OnExit.RELOAD, OnExit.FORGET, None)),
            load_seconds=100.0 if self.is_crowded else random.choice((40.0, 100.0)),
            is_embedded=is_embedded,
            places_gpus=random.random() < 0.5,
            stores=settings,
            load_threads=random.choice((1, 2, 4)),
        )
        stage.triton.lag_seconds = random.choice((0.0, 0.0, 3.0))
        stage.packages.confirm_seconds = random.choice((0.001, 1.0))
        stage.packages.remove_seconds = random.choice((0.001, 0.5))
        stage.store.disk_limit = random.choice((None, None, 4))
        return stage

    def _draw_script(self) -> Script:
        random = self.random
        size = random.choice((60, 100, 200, 300, 400, 600, 900, 1200))
        if self.is_crowded:
            size = random.choice((400, 600, 800))
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
        is_hanging = random.random() < 0.04 and not self.is_crowded
        load_seconds = random.choice((0.1, 1.0, 3.0, 10.0))
        return Script(
            sizes,
            declared=random.choice((None, None, size, size // 2)),
            files=random.choice((None, size // 4, size)),
            load_seconds=min(load_seconds, 1.0) if self.is_crowded else load_seconds,
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
            stage.end_watch()
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
            if self.is_crowded:  # nothing hangs, so whoever came to his limit waited for himself
                late = [name for name in self.outcomes if name.endswith("BackendTimeout")]
                assert not late, f"came to their time limit: {late}"
            await self._unload_all()
            self._watch_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch_task
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
        kind = name.partition(" ")[0]
        try:
            await act()
        except AdapterError as error:
            if type(error) is InferenceFailed:
                raise AssertionError(f"{name}: {error}") from error
            self.outcomes[f"{kind} {type(error).__name__}"] += 1
        else:
            self.outcomes[f"{kind} ok"] += 1

    def _draw_action(self) -> tuple[str, Callable[[], Awaitable[object]]]:
        actions = {
            self._draw_load: 12,
            self._draw_unload: 11,
            self._draw_replace: 7,
            self._draw_request: 20,
            self._draw_wait: 8,
            self._draw_named: 3,
            self._draw_bump: 30 if self.is_crowded else 3,
            self._draw_call: 36,
        }
        [draw] = self.random.choices(list(actions), list(actions.values()))
        return draw()

    def _draw_load(self) -> Action:
        name = self.random.choice(self.names)
        source = ModelSource(self.random.choice(_FOLDERS))
        maker = self.random.choice((RoomMaker.ADAPTER, RoomMaker.ADAPTER, RoomMaker.MESH))
        models = self.stage.models
        return f"load {name}", lambda: models.load(name, source, maker)

    def _draw_unload(self) -> Action:
        name = self.random.choice((*self.names, *self.names, *self.names, *self.keys))
        return f"unload {name}", lambda: self.stage.models.unload(name)

    def _draw_replace(self) -> Action:
        name = self.random.choice(self.names)
        source = ModelSource(self.random.choice(_FOLDERS))
        replaces = self.random.choice(list(Replaces))
        return f"replace {name}", lambda: self.stage.models.replace(name, source, replaces)

    def _draw_request(self) -> Action:
        name = self.random.choice(self.names)
        seconds = self._draw_seconds()
        return f"invoke {name}", lambda: self.stage.invoke(name, seconds)

    def _draw_wait(self) -> Action:
        name = self.random.choice(self.names)
        return f"wait {name}", lambda: self.stage.wait_and_invoke(name)

    def _draw_named(self) -> Action:
        key = self.random.choice(self.keys)
        is_forced = self.random.random() < 0.5
        on_demand = self.stage.control.on_demand
        return f"named {key}", lambda: on_demand.load(key, is_forced=is_forced)

    def _draw_bump(self) -> Action:
        key = self.random.choice(self.keys)
        return f"bump {key}", lambda: self._bump(key)

    def _draw_call(self) -> Action:
        key = self.random.choice(self.keys)
        seconds = self._draw_seconds()
        caller = self.random.choice(("", "x", "y"))
        return f"call {key}", lambda: self.stage.call(key, seconds, caller)

    def _draw_seconds(self) -> float:
        return self.random.choice((0.05, 0.3, 2.0, 8.0))

    async def _bump(self, key: ModelId) -> None:
        """Give a model of the store another version."""
        versions = self.stage.store.versions
        versions[key] = (versions[key] + 1) % _VERSIONS

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
            _, late = await asyncio.wait(tasks, timeout=_BOUND_SECONDS)
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
        await self._unload_each()
        await self._unload_each()
        if any(r.state is ModelState.STUCK for r in stage.control.registry.records()):
            stage.triton.exit()
        await asyncio.sleep(200)
        records = stage.control.registry.records()
        assert not records, records
        ledger = stage.control.ledger
        for device in ledger.devices:
            figures = (ledger.reserved(device), ledger.booked(device), ledger.leaving(device))
            assert figures == (0, 0, 0), (device, figures)

    async def _unload_each(self) -> None:
        for record in self.stage.control.registry.records():
            with suppress(AdapterError):
                await asyncio.wait_for(self.stage.models.unload(record.id), _BOUND_SECONDS)


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
    assert not collector.bugs, collector.bugs[0]
    assert not failures, repr(failures[0])
    return outcomes


def main() -> int:
    """Play seeds of the command line."""
    first = int(sys.argv[1])
    count = int(sys.argv[2])
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger().addHandler(logging.NullHandler())
    total: Counter[str] = Counter()
    failed: list[int] = []
    for seed in range(first, first + count):
        try:
            total += play(seed)
        except Exception:  # noqa: BLE001 - the next seed is played all the same
            failed.append(seed)
            sys.stdout.write(f"seed {seed}: {traceback.format_exc()[-4000:]}\n")
    sys.stdout.write(f"{dict(sorted(total.items()))}\n{count} plays, failed: {failed}\n")
    return min(1, len(failed))


if __name__ == "__main__":
    sys.exit(main())

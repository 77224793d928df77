"""One run: makes the requests, warms up, then measures the targets in turn, slice by slice."""

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from adapter.tools.bench.control import Change, Churner, ControlClient, metadata_of
from adapter.tools.bench.errors import BenchError, printable
from adapter.tools.bench.load import ClosedLoop, Load, LoadOptions, OpenLoop, TargetLoad, arrivals
from adapter.tools.bench.payload import Payload, from_metadata
from adapter.tools.bench.plan import Plan
from adapter.tools.bench.record import Recorder, Usage, usage

_CELLS = 24
_CLEAR = "\r\x1b[2K"


class Progress:
    """Shows progress in one line of a terminal, nothing elsewhere. A refresh of rich blocks the
    loop for 0.4 to 1.5 ms, which latencies would show; this takes 0.02 ms.
    """

    def __init__(self, seconds: float | None, count: int | None) -> None:
        """Take the limits of all slices together, None for no limit."""
        self._is_shown = sys.stderr.isatty()
        self._seconds = seconds
        self._count = count
        self._started = perf_counter()
        self._answered = 0
        self._label = ""

    def begin(self, label: str) -> None:
        self._label = label
        self._write(f"{label} ...")

    def tick(self, recorder: Recorder) -> None:
        interval = recorder.intervals[-1]
        self._answered += interval.answered + interval.failed
        rate = interval.answered / interval.seconds if interval.seconds else 0.0
        figures = [f"{rate:,.0f}/s"]
        for name, value in (("p50", interval.p50), ("p99", interval.p99)):
            figures.append(f"{name} {'-' if value is None else f'{value * 1e3:.2f} ms'}")
        figures.append(f"{recorder.errors.total} errors")
        self._write(f"{self._bar()}  {self._label}  {'  '.join(figures)}")

    def _bar(self) -> str:
        passed = perf_counter() - self._started
        by_time = passed / self._seconds if self._seconds else 0.0
        by_count = self._answered / self._count if self._count else 0.0
        full = int(min(1.0, max(by_time, by_count)) * _CELLS)
        return f"[{'#' * full}{'-' * (_CELLS - full)}] {passed:.0f} s"

    def _write(self, text: str) -> None:
        if self._is_shown:
            sys.stderr.write(f"{_CLEAR}{printable(text)}")
            sys.stderr.flush()

    def end(self) -> None:
        self._write("")


_SEED = 1  # a repeated run sends the same values at the same moments
_CONTROL_SECONDS = 360.0  # after which SageMaker gives up on a load
_LAST_CHANGE_SECONDS = 5.0  # what a churn may still take when the user stops the run


@dataclass(frozen=True, slots=True)
class Slice:
    """One slice against the target of that number. `processes`: the usage before and after."""

    target: int
    at: float
    seconds: float
    own_cpu_seconds: float
    recorder: Recorder
    processes: tuple[tuple[Usage | None, Usage | None], ...]
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`started_at` is the time of day, in seconds since 1970. `payload_bytes` are those of the
    smallest and of the largest request, as JSON.
    """

    started_at: float
    payload_bytes: tuple[int, int]
    models: tuple[str, ...]
    slices: tuple[Slice, ...]
    is_interrupted: bool


class Session:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._interrupted = asyncio.Event()
        self._load: Load | None = None
        self._started = perf_counter()
        pace, times = plan.pace, len(plan.targets)
        self._progress = Progress(
            pace.seconds and times * (pace.seconds + pace.warmup_seconds),
            pace.count and times * pace.count,
        )

    async def run(self) -> Outcome:
        """Measure; SIGINT ends that early. Raises BenchError when nothing can be measured."""
        started_at = time.time()
        models = await self._models()
        payloads = {model: await self._payload(model) for model in models}
        with ExitStack() as stack:
            all_measured = [
                TargetLoad(self._plan, target, payloads) for target in self._plan.targets
            ]
            for measured in all_measured:
                stack.callback(measured.close)
                await measured.open()
            stack.callback(self._progress.end)
            gc.collect()
            gc.freeze()  # keeps collections short while we measure
            stack.callback(gc.unfreeze)
            with self._interruptible():
                slices = await self._measure(all_measured)
        sizes = [len(payload.as_json()) for payload in payloads.values()]
        is_interrupted = self._interrupted.is_set()
        return Outcome(
            started_at, (min(sizes), max(sizes)), tuple(models), tuple(slices), is_interrupted
        )

    async def _models(self) -> tuple[str, ...]:
        plan = self._plan
        if plan.models:
            return plan.models
        control = ControlClient(plan.targets[0].address, plan.headers, _CONTROL_SECONDS)
        models = tuple(await control.models())
        if not models:
            raise BenchError(f"{plan.targets[0].url} has no model loaded")
        return models

    async def _payload(self, model: str) -> Payload:
        plan = self._plan
        if plan.payload is not None:
            return plan.payload
        own = [(target.address, target.protocol) for target in plan.targets]
        places = [plan.metadata] if plan.metadata else own
        metadata = await metadata_of(places, model, plan.headers)
        return from_metadata(metadata, plan.shape, _SEED)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def _interrupt(self) -> None:
        self._interrupted.set()
        if self._load is not None:
            self._load.stop()

    async def _measure(self, all_measured: list[TargetLoad]) -> list[Slice]:
        plan, slices = self._plan, []
        for measured in all_measured:
            await self._warm_up(measured)
        self._started = perf_counter()
        for _ in range(plan.slices):
            for number, measured in enumerate(all_measured):
                if not self._interrupted.is_set():
                    slices.append(await self._slice(number, measured))
        return slices

    async def _warm_up(self, measured: TargetLoad) -> None:
        seconds = self._plan.pace.warmup_seconds
        if seconds and not self._interrupted.is_set():
            self._progress.begin(f"warm-up {measured.target.url}")
            options = self._options(measured, Recorder(0.0, perf_counter()), ticks=False)
            await self._drive(measured, ClosedLoop(options, seconds, None))

    async def _slice(self, number: int, measured: TargetLoad) -> Slice:
        plan = self._plan
        self._progress.begin(measured.target.url)
        before = [usage(pid) for pid in plan.pids]
        own, began = time.process_time(), perf_counter()
        load = self._new_load(measured, Recorder(self._started, began))
        changes = await self._with_churn(measured, load)
        after = [usage(pid) for pid in plan.pids]
        return Slice(
            target=number,
            at=began - self._started,
            seconds=load.last_answer - load.started,
            own_cpu_seconds=time.process_time() - own,
            recorder=load.recorder,
            processes=tuple(zip(before, after, strict=True)),
            changes=changes,
        )

    def _options(
        self, measured: TargetLoad, recorder: Recorder, *, ticks: bool = True
    ) -> LoadOptions:
        pace = self._plan.pace
        return LoadOptions(
            measured.slots,
            measured.requests,
            recorder,
            pace.timeout_seconds,
            pace.interval_seconds,
            self._progress.tick if ticks else lambda _: None,
        )

    def _new_load(self, measured: TargetLoad, recorder: Recorder) -> Load:
        pace, slices = self._plan.pace, self._plan.slices
        options = self._options(measured, recorder)
        seconds = pace.seconds and pace.seconds / slices
        count = pace.count and pace.count // slices
        if pace.rate is None:
            return ClosedLoop(options, seconds, count)
        schedule = partial(
            arrivals, pace.rate, poisson=pace.poisson, seconds=seconds, count=count, seed=_SEED
        )
        return OpenLoop(options, schedule)

    async def _with_churn(self, measured: TargetLoad, load: Load) -> tuple[Change, ...]:
        churn, address = self._plan.churn, measured.target.churn_at
        if churn is None or address is None:
            await self._drive(measured, load)
            return ()
        control = ControlClient(address, self._plan.headers, _CONTROL_SECONDS)
        churner, stopped = Churner(control, churn, self._started), asyncio.Event()
        task = asyncio.ensure_future(churner.run(stopped))
        try:
            await self._drive(measured, load)
            stopped.set()
            await self._last_change(task)
        finally:
            task.cancel()
        return tuple(churner.changes)

    async def _last_change(self, task: asyncio.Future[None]) -> None:
        """Wait for the last change, but not long once the user has stopped the run."""
        stopped = asyncio.ensure_future(self._interrupted.wait())
        either: list[asyncio.Future[Any]] = [task, stopped]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        await asyncio.wait([task], timeout=_LAST_CHANGE_SECONDS)
        if task.done():
            task.result()

    async def _drive(self, measured: TargetLoad, load: Load) -> None:
        measured.load = self._load = load
        try:
            await load.run()
        finally:
            measured.load = self._load = None

"""Knows which version of each model the store had and named when, and judges each answer by that.

A model's contents are put into the store again and again: each put has a number, and a rollback is
a put of contents that were there before. An answer shows which contents it came from. It is right
if there is a put of these contents that

- was there before the answer ended, and
- is not older than a put that an earlier answer surely came from. Where several puts fit, the
  oldest is believed, so that no right answer is ever objected to.

While the store is away, what is loaded from disk must be the version that it named last. The bucket
tells when it has answered which version. If the adapter was killed or the store went away within
seconds of that, nobody knows whether the adapter has read and noted the answer. Then the version
that was named before is right as well.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

_SETTLE_SECONDS = 3.0


@dataclass(frozen=True)
class Put:
    """Contents that came into the store; None where the model was deleted."""

    contents: int | None
    at: float


@dataclass
class Call:
    """One call of a model, and when it was."""

    key: str
    floor: int  # the put before which no answer may fall
    began: float
    ended: float = float("inf")
    cache: str = ""  # where the adapter found the model


@dataclass
class Window:
    """A time in which something was amiss; without an end it is not over."""

    began: float
    ended: float = float("inf")

    def touches(self, began: float, ended: float) -> bool:
        """Return whether the two times have a moment in common."""
        return self.began <= ended and began <= self.ended


@dataclass
class _Model:
    puts: list[Put] = field(default_factory=list)
    floor: int = 0  # the put that an answer came from, by its place in `puts`
    names: list[Put] = field(default_factory=list)  # contents that the store named, and when


class Windows:
    """Records the times of one kind of fault, of which the last may not be over."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.all: list[Window] = []
        self._now = now

    def begin(self) -> None:
        self.all.append(Window(self._now()))

    def end(self) -> None:
        self.all[-1].ended = self._now()

    def touch(self, call: Call, after_seconds: float = 0) -> bool:
        """Return whether one has a moment in common with the call, or ended a little before."""
        began = call.began - after_seconds
        return any(window.touches(began, call.ended) for window in self.all)


class Oracle:
    """Judges answers. All methods may be called in any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.outages = Windows(now)
        self.storms = Windows(now)
        self.adapter_down = Windows(now)
        self.triton_down = Windows(now)
        self._now = now
        self._models: dict[str, _Model] = defaultdict(_Model)
        self._lock = threading.Lock()
        self._breaks: list[float] = []
        self._started_at = now()

    # -- what happens -----------------------------------------------------------------------

    def expect_put(self, key: str, contents: int | None) -> None:
        """Record a put that is about to be seen."""
        with self._lock:
            self._models[key].puts.append(Put(contents, self._now()))

    def record_name(self, key: str) -> None:
        """Record that the store is about to name the version that it has."""
        with self._lock:
            model = self._models.get(key)
            if model is not None and model.puts:
                model.names.append(Put(model.puts[-1].contents, self._now()))

    def record_break(self) -> None:
        """Record that the adapter may not have noted what the store named a moment ago."""
        self._breaks.append(self._now())

    def record_start(self) -> None:
        """Record that an adapter is about to be started, with nothing loaded."""
        self._started_at = self._now()

    # -- what is known ----------------------------------------------------------------------

    def latest(self, key: str) -> int | None:
        """Return the contents that the store has now."""
        return self._models[key].puts[-1].contents

    def had(self, key: str) -> list[int]:
        """Return all contents that the model ever had."""
        return [put.contents for put in self._models[key].puts if put.contents is not None]

    def was_deleted(self, call: Call, after_seconds: float) -> bool:
        """Return whether the store lacked the model during the call or a little before."""
        puts = self._models[call.key].puts
        ends = [put.at for put in puts[1:]] + [float("inf")]
        began = call.began - after_seconds
        return any(
            put.contents is None and Window(put.at, end).touches(began, call.ended)
            for put, end in zip(puts, ends, strict=True)
        )

    def begin_call(self, key: str) -> Call:
        """Return a call that begins now."""
        with self._lock:
            return Call(key, self._models[key].floor, self._now())

    def named_last(self, key: str, before: float) -> set[int | None]:
        """Return the contents that the adapter may take for those that the store named last."""
        with self._lock:
            names = [name for name in self._models[key].names if name.at <= before]
        found: set[int | None] = set()
        for name in reversed(names):
            found.add(name.contents)
            if not any(0 <= at - name.at <= _SETTLE_SECONDS for at in self._breaks):
                break
        return found

    # -- answers ----------------------------------------------------------------------------

    def judge(self, call: Call, contents: int) -> str | None:
        """Return what is wrong with an answer of these contents; None if it is right."""
        with self._lock:
            model = self._models[call.key]
            fitting = [
                place
                for place, put in enumerate(model.puts)
                if place >= call.floor and put.contents == contents and put.at <= call.ended
            ]
            if not fitting:
                shown = [put.contents for put in model.puts[call.floor :]]
                return f"answered by version {contents}; right are {shown}"
            model.floor = max(model.floor, fitting[0])
        return self._judge_outage(call, contents)

    def _judge_outage(self, call: Call, contents: int) -> str | None:
        outage = self.outages.all[-1] if self.outages.all else None
        if outage is None or not outage.began < call.began <= call.ended < outage.ended:
            return None
        if call.cache == "hit" and self._started_at < outage.began:
            return None  # a model that was loaded before the outage serves its version on
        allowed = self.named_last(call.key, outage.began)
        if contents in allowed:
            return None
        where = f"found at {call.cache!r} in an outage"
        return f"version {contents} {where}; the store named {allowed} last"

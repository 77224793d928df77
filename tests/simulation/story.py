"""Keep what happened in a run, in the words of docs/events.md, with simulated times."""

import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from adapter.telemetry.log import EVENTS
from tests.simulation.kills import ADAPTER, Killed
from tests.simulation.loop import BEGIN
from tests.simulation.models import Violated
from tests.simulation.plan import Plan

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_BUGS = frozenset({"operation.failed", "task.failed", "task.ended"})


class Story(logging.Handler):
    """Collects the events of the log, and those of the world."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        self.bugs: list[str] = []
        self.hidden = "\0"  # a path that is another in each run
        self.on_log_line: Callable[[str, dict[str, object]], object] = lambda _, __: None
        self._now = now
        self._hash = sha256()

    def note(self, event: str, **fields: object) -> None:
        self._add("world", event, fields)

    def emit(self, record: logging.LogRecord) -> None:
        adapter = ADAPTER.get()
        if adapter is not None and not adapter.is_running:
            return
        event = str(record.msg)
        fields = {k: v for k, v in vars(record).items() if k not in _STANDARD}
        is_bug = event in {"model.load_failed", "model.unload_failed"} and "error" not in fields
        if is_bug or event in _BUGS or event not in EVENTS:
            error = record.exc_info[1] if record.exc_info else None
            if isinstance(error, Killed):
                return
            self.bugs.append(f"{event} {fields} {error!r}")
        self._add("adapter", event, fields)
        self.on_log_line(event, fields)

    def _add(self, who: str, event: str, fields: dict[str, object]) -> None:
        said = json.dumps(fields, default=_text_of, sort_keys=True).replace(self.hidden, "")
        line = f"{self._now() - BEGIN:11.3f} {who:7} {event} {said if fields else ''}".rstrip()
        self.counts[event] += 1
        self.lines.append(line)
        self._hash.update(line.encode() + b"\n")

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


@dataclass(slots=True)
class Outcome:
    """Says how a run has ended."""

    plan: Plan
    story: Story
    violation: Violated | None  # None when all went well
    operations: int
    faults: Counter[str]


def _text_of(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return str(value)

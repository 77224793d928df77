"""Logs events to stdout, one a line. The message is the event's name; figures are fields.

`logger.info("model.loaded", extra={"model_id": id, "seconds": 1.2})`
"""

import io
import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, TextIO

EVENTS: Mapping[str, str] = {
    "adapter.failed": "it could not start, for the reason given; the process ends",
    "adapter.listening": "a listener is open; fields say which and where",
    "adapter.started": "ready for work",
    "adapter.stopped": "everything is closed; the process ends",
    "adapter.stopping": "asked to stop; work in flight goes on for a while",
    "log.dropped": "lines that are not here: whoever reads the log stood still; how many",
    "memory.sizes_unreadable": "the file of measured sizes is damaged; they are learned anew",
    "memory.sizes_unwritable": "measured sizes cannot be kept for the next run",
    "memory.source": "another memory reader is believed from now on; fields say which and why",
    "model.abandoned": "process and files of a model are gone; only Triton's index still has it",
    "model.adopted": "a model that an earlier run loaded is still in Triton and is served",
    "model.drain_timed_out": "an unload did not wait any longer for inferences in flight",
    "model.left_running": "something of a model that is gone, or cannot be ended, runs in Triton",
    "model.load_failed": "a load was tried and lost, or undone as it took more than there was",
    "model.load_refused": "Triton was not asked for a load, for the reason given",
    "model.load_retried": "a load that ran out of memory is tried once more: memory came back",
    "model.load_ended": "a load passed the memory limit by more than the reserve; its python "
    "process was killed",
    "model.load_stuck": "Triton does not answer for a load; it keeps one of Triton's load threads",
    "model.loaded": "a model is ready",
    "model.package_odd": "a package has something odd that is no fault, for the reasons given",
    "model.processes_killed": "processes of a model did not end with it and were killed",
    "model.undo_failed": "what a failed load left behind in Triton could not be removed",
    "model.unload_stalled": "an unload showed no progress and is tried again",
    "model.unload_failed": "an unload was tried and lost; the model is still there",
    "model.unload_waits": "an unload has waited 2 s for requests: in_flight, abandoned of them; "
    "seconds that it waits still, at most",
    "model.unload_refused": "an unload was not tried: the model is not loaded",
    "model.unloaded": "a model is gone and its memory is given back",
    "modelmesh.broken_off": "the end of Triton broke a load or unload off; it is done once more",
    "modelmesh.purge_failed": "what was loaded could not be taken down for a mesh that starts",
    "operation.failed": "a bug: this operation of control ended with an error nobody foresaw",
    "request.failed": "a request was answered with an error",
    "settings.ignored": "a setting has no effect, for the reason given",
    "task.ended": "a bug: what must go on as long as the adapter has ended; /livez says so too",
    "task.failed": "one step of what goes on as long as the adapter failed; the next one follows",
    "triton.ended": "the embedded tritonserver is ended by us, for the reason given",
    "triton.exited": "the embedded tritonserver ended",
    "triton.log": "a line of the embedded tritonserver's own log",
    "triton.log_dropped": "lines of that were too many a second and are not here; how many",
    "triton.models_vanished": "Triton no longer has models that were loaded: it was restarted",
    "triton.reachable": "Triton answers again; seconds since `triton.unreachable`",
    "triton.restart_failed": "the embedded tritonserver could not be started again; tried later",
    "triton.restart_hook_failed": "a bug: taking stock after a restart of Triton failed",
    "triton.restarted": "the embedded tritonserver was started again",
    "triton.unreachable": "Triton does not answer; `triton.reachable` is the end of it",
}

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_MAX_CHARACTERS = 10_000  # of one field, and of an exception
_BARE = re.compile(r"[\w.:/@%+~-]+")


def setup_logging(
    level: Literal["debug", "info", "warning", "error"],
    format: Literal["auto", "json", "text"],  # noqa: A002 - the setting's name
    stream: TextIO | io.TextIOBase | None = None,
) -> None:
    """Send every logger's records to one stream (stdout), replacing any earlier set-up."""
    out = sys.stdout if stream is None else stream
    is_text = format == "text" or (format == "auto" and out.isatty())
    handler = logging.StreamHandler(out)
    handler.setFormatter(TextFormatter() if is_text else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_caller_who_left)
    # one line a request: the metrics count requests, and inference is not logged on purpose
    logging.getLogger("aiohttp.access").disabled = True


def _is_no_caller_who_left(record: logging.LogRecord) -> bool:
    """Filter out what grpc logs when an answer is ready and its caller has just gone: that is not
    an error, as frequent as callers' short deadlines are, and each case is counted already.
    """
    return not _event(record).startswith("ExecuteBatchError raised in core by servicer method")


class JsonFormatter(logging.Formatter):
    """Writes ASCII only, so lone surrogates and the stream's encoding do not matter."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": _event(record),
            **_extra(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)[-_MAX_CHARACTERS:]
        return "{" + ", ".join(f"{_json(str(k))}: {_json(v)}" for k, v in fields.items()) + "}"


class TextFormatter(logging.Formatter):
    """`12:34:56.789 warning model.load_failed model_id=fraud reason="no such file"`."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)[11:23]} {record.levelname.lower():<7} {_printable(_event(record))}"
        line = " ".join([head, *(f"{k}={_bare(v)}" for k, v in _extra(record).items())])
        if record.exc_info:
            line += "\n" + _printable(self.formatException(record.exc_info)[-_MAX_CHARACTERS:])
        return line


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _event(record: logging.LogRecord) -> str:
    try:
        return _cut(record.getMessage())
    except Exception:  # noqa: BLE001 - arguments that do not fit must not lose the line
        return _cut(_text(record.msg))


def _extra(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields given by `extra`. They cannot replace those of every line."""
    own = {"time", "level", "logger", "event", "exception"}
    return {
        (f"{key}_" if key in own else key): value
        for key, value in vars(record).items()
        if key not in _STANDARD
    }


def _json(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(_cut(value))
    try:
        written = json.dumps(value, default=_text, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # odd keys, NaN, a value inside itself
        return json.dumps(_cut(_text(value)))
    # a long list, or an object with much in it, becomes a text
    return written if len(written) <= _MAX_CHARACTERS else json.dumps(_cut(written))


def _cut(text: str) -> str:
    """Bound the length of a field, whatever a caller has sent."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]} ... ({len(text) - _MAX_CHARACTERS} characters cut)"


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a log line must not break the work that it is about
        return f"<{type(value).__name__}>"


def _bare(value: object) -> str:
    """Quote the value unless it is one plain word, so that it cannot look like another field."""
    text = _cut(_text(value))
    return text if text.isascii() and _BARE.fullmatch(text) else _json(text)


def _printable(text: str) -> str:
    """Escape what a terminal or the stream cannot show."""
    shown = "".join(c if c in "\n\t" or c.isprintable() else _json(c)[1:-1] for c in text)
    return shown.encode("ascii", "backslashreplace").decode()

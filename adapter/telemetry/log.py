"""Logs events to stdout, one a line. The message is the event's name; figures are fields.

`logger.info("model.loaded", extra={"model_id": id, "seconds": 1.2})`
"""

import asyncio
import io
import json
import logging
import os
import re
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Literal, TextIO, TypeAlias

from adapter.core.calls import RpcMetadata
from adapter.errors import ModelFailed, OutOfMemory
from adapter.runtime import clock

log = logging.getLogger(__name__)

EVENTS: Mapping[str, str] = {
    "adapter.failed": "the adapter cannot start, for the reason given; the process ends",
    "adapter.listening": "a listener is open, with its name and address",
    "model.not_revalidated": "the check for a new version of a loaded model failed",
    "model.not_renewed": "a new version of a loaded model could not replace it",
    "adapter.preload_refused": "a model of preload is missing or invalid, and is not tried again",
    "adapter.wanted_no_more": "a caller unloaded a model of load_at_start or preload: it is not "
    "loaded again, and readiness does not wait for it",
    "body.cut": "bodies were refused because the byte budget is full, with the reason, their "
    "number and the bytes buffered",
    "adapter.nothing_to_load": "the folders of load_at_start have no model: is a volume missing?",
    "adapter.models_loaded": "all models of load_at_start and preload are loaded",
    "adapter.open_to_others": "other machines reach these listeners, which do not "
    "authenticate callers",
    "adapter.root_missing": "a folder of model_roots is missing; packages in it are refused",
    "adapter.root_relative": "a folder of model_roots is relative, with its absolute path",
    "adapter.started": "the adapter is ready",
    "adapter.stopped": "everything is closed; the process ends",
    "adapter.stopping": "asked to stop; work in flight continues for a while",
    "artifact.cache_lost": "the folder of the disk cache was emptied, and another adapter uses "
    "it; nothing is fetched until that one ends",
    "artifact.cache_opened": "the disk cache is open, with the contents from an earlier run and "
    "the addresses of the stores",
    "artifact.disk_full": "the cache's disk has no room, for the reason given; a fetch must "
    "remove other files first",
    "artifact.evicted": "a model's files were removed from the disk cache, by cache_limit (reason "
    "limit) or as the disk was full (disk)",
    "artifact.fetch_begun": "a model is being fetched from a store",
    "artifact.fetch_failed": "a fetch of a model failed, for the reason given",
    "artifact.fetched": "a model's files are in the disk cache; bytes as the store has them",
    "artifact.lost": "files of a model in the disk cache were deleted; it is fetched again",
    "artifact.not_checked": "the store did not answer; the version that it named last, whose ETag "
    "is etag, is loaded from disk",
    "artifact.not_deleted": "files of an evicted model or of a fetch cannot be deleted, for the "
    "reason given; their bytes count as used, and the adapter keeps trying",
    "artifact.store_unreachable": "a store cannot be used, for the reason given; the adapter "
    "keeps trying",
    "log.dropped": "log lines were dropped because stdout was not read in time, with their number",
    "memory.forgotten": "an operator had the size of a model's package forgotten, and that it did "
    "not fit",
    "memory.gpu_unread": "the memory of a visible GPU cannot be read or its reading is "
    "impossible, for the reason given; without memory_limit Triton tries every load",
    "memory.not_measured": "no memory is read and no limit is set: Triton tries every load; set "
    "memory_limit",
    "memory.report_differs": "Triton's report of a model's memory and a reading differ by more "
    "than 10 %; the report counts; once per package",
    "memory.sizes_unreadable": "the file of measured sizes is damaged; sizes are measured again",
    "memory.sizes_unwritable": "measured sizes cannot be kept for the next run",
    "memory.source": "memory is read from another source, with its name and the reason",
    "model.abandoned": "a model's process and files are gone, but Triton's index still lists it",
    "model.admitted": "at debug: a load has its memory reserved; bytes by device",
    "model.adopted": "a model that an earlier run loaded is still in Triton and is served",
    "model.drain_timed_out": "an unload stopped waiting for inferences in flight",
    "model.given_up": "a model is not loaded for some seconds, because it was at work at several "
    "exits of Triton",
    "model.left_running": "a process of an unloaded model still runs, or cannot be ended",
    "model.load_failed": "a load failed, or was undone because it took more than was free",
    "model.load_refused": "a load was refused before Triton began it, for the reason given",
    "model.load_retried": "a load that ran out of memory is retried once, as memory became free",
    "model.load_ended": "a load was ended, for the reason given: more than the memory limit was "
    "used, or it was undone; its python processes were killed",
    "model.load_stuck": "Triton does not answer a load, which occupies a load thread",
    "model.load_waits": "a load waits for its turn or for memory; bytes by device",
    "model.loaded": "a model is ready",
    "model.loading": "a load begins",
    "model.outputs_missing": "a model's answer lacked all of its outputs; once per load",
    "model.package_odd": "a package is odd but can be served, for the reasons given",
    "model.placed": "a load was placed on one GPU; needed and free bytes by device",
    "model.processes_killed": "processes of a model outlived it and were killed",
    "model.regions_freed": "shared memory of dead processes that Triton kept was freed, with its "
    "bytes",
    "model.return_broken_off": "Triton ended while a model was loaded again; the load is retried",
    "model.return_given_up": "a model that Triton lost is not loaded again, for the reason given",
    "model.step": "at debug: the next step that a load or an unload waits for",
    "model.undo_failed": "the remains of a failed load in Triton could not be removed",
    "model.unload_stalled": "an unload showed no progress and is tried again",
    "model.unload_failed": "an unload failed; the model is still there",
    "model.requests_lost": "an unload ended with requests unanswered, as Triton released the "
    "model and its processes ended",
    "model.unload_waits": "an unload waits for requests: in_flight, the abandoned among them, and "
    "the longest wait in seconds",
    "model.unloaded": "a model is unloaded, with the bytes that it returned",
    "model.unloading": "an unload begins and waits for in_flight requests. evicted: the reason "
    "for an eviction; with reason room: evicted_for, the worth of the model, and return_seconds, "
    "the time to bring it back; replaced_by: the model whose old version this was",
    "model.warm_up_failed": "a model failed to compute zeros, for the reason given; it is served",
    "model.warm_up_skipped": "a model was loaded without an inference of zeros, for the reason "
    "given",
    "model.warmed_up": "a model has computed zeros before its load is answered",
    "modelmesh.broken_off": "the end of Triton interrupted a load or unload; it is repeated",
    "modelmesh.purge_failed": "models could not be unloaded for a ModelMesh that starts",
    "operation.failed": "a bug: an operation on a model ended with an unexpected error",
    "request.answered": "at debug: a request was answered, with its seconds and those in Triton",
    "request.failed": "a request was answered with an error; at debug, if a load or an unload "
    "has a line of its own",
    "request.failed_again": "more requests failed with the same error within a second, with their "
    "number",
    "settings.odd": "a setting has no effect, or names something that does not exist",
    "stream.cut": "a stream was ended because its caller reads too slowly, with its waiting "
    "answers and bytes",
    "task.ended": "a bug: a background task of the adapter ended; /livez returns 503",
    "task.failed": "one step of such a task failed; the next one follows",
    "triton.awaited": "Triton is not live yet, with its address, the time waited and the reason",
    "triton.called": "at debug: a control call to Triton ended, with the gRPC code",
    "triton.ended": "the adapter ends the embedded tritonserver, for the reason given",
    "triton.exit_charged": "an exit of Triton is charged to a model: how many of how many charges "
    "that give it up",
    "triton.exited": "the embedded tritonserver ended",
    "triton.log": "a line of the embedded tritonserver's own log",
    "triton.log_dropped": "lines of that log beyond the rate limit were dropped, with their number",
    "triton.models_vanished": "Triton no longer has models that were loaded: it was restarted, or "
    "somebody has unloaded them there",
    "triton.no_gpu": "the embedded tritonserver finds no GPU, for the reason given; its own lines "
    "are at debug",
    "triton.not_explicit": "Triton takes no loads: it is not in explicit model control mode",
    "triton.reachable": "Triton answers again; seconds since `triton.unreachable`",
    "triton.environment_left": "files that Triton unpacked stay if it is killed, for the reason "
    "given",
    "triton.region_left": "shared memory of a dead process could not be freed, for the reason "
    "given",
    "triton.restart_failed": "the embedded tritonserver could not be restarted; the adapter keeps "
    "trying",
    "triton.restarted": "the embedded tritonserver was started again",
    "triton.strangers_unloaded": (
        "models that somebody loaded into Triton past the adapter are unloaded for a ModelMesh "
        "that starts"
    ),
    "triton.unreachable": "Triton does not answer, until `triton.reachable`",
}

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_MAX_CHARACTERS = 10_000  # of one field, and of an exception
_BARE = re.compile(r"[\w.:/@%+~-]+")
# The stamp of the embedded tritonserver's lines, as glog writes it:
# I1122 11:34:46.537778 17015 server.cc:631] text
_TRITONS_STAMP = re.compile(r"[IWEF]\d{4} \d{2}:\d{2}:\d{2}\.\d+ +\d+ [^\s:\]]+:\d+\] ")
_COLOURS = {"debug": "2", "warning": "33", "error": "31", "critical": "31"}  # as SGR numbers them
# Requests that fail alike get this many lines in this many seconds.
_LINES = 20
_SECONDS = 1.0
# Errors whose lines are counted for each model.
_OF_MODEL = (ModelFailed, OutOfMemory)
_Kind: TypeAlias = tuple[type[Exception], int, str | None]
# The limits of what waits for the log's reader.
_MAX_LINES = 10_000
_MAX_BYTES = 4 * 2**20
_POLL_MILLISECONDS = 1000
# How long the thread gathers lines: a wake-up for each costs the event loop more than the line.
_GATHER_SECONDS = 0.005
# W3C Trace Context: version, trace, parent, flags
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")
_MAX_ID_CHARACTERS = 1024  # SageMaker's limit of its longest field
# Callers' request ids: headers, and fields of the log.
_FIELDS = {
    "x-amzn-sagemaker-target-model": "target_model",
    "x-amzn-sagemaker-inference-id": "inference_id",
    "x-amzn-sagemaker-custom-attributes": "custom_attributes",
    "x-request-id": "request_id",
}


def setup_logging(
    level: Literal["debug", "info", "warning", "error"],
    format: Literal["auto", "json", "text"],  # noqa: A002 - the setting's name
    stream: TextIO | io.TextIOBase | None = None,
) -> None:
    """Send every logger's records to one stream (stdout), replacing any earlier set-up.

    The level `debug` is for the adapter's own loggers: libraries are at `info` then.
    """
    out = sys.stdout if stream is None else stream
    handler = logging.StreamHandler(out)
    is_coloured = out.isatty() and _should_colour()
    text = TextFormatter(is_coloured=is_coloured)
    handler.setFormatter(text if is_text(format, out) else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    handler.addFilter(lambda record: record.levelno > logging.DEBUG or _is_own(record))
    root.setLevel(level.upper())
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_caller_who_left)
    # one line a request: the metrics count requests, and inference is not logged on purpose
    logging.getLogger("aiohttp.access").disabled = True


def is_text(format: str, stream: TextIO | io.TextIOBase) -> bool:  # noqa: A002 - see above
    """Return whether lines are for people, and not JSON."""
    return format == "text" or (format == "auto" and stream.isatty())


def _should_colour() -> bool:
    """Return whether the environment allows colours."""
    is_plain = os.environ.get("TERM", "dumb") in {"dumb", "unknown"}
    return not is_plain and not os.environ.get("NO_COLOR")


def _is_own(record: logging.LogRecord) -> bool:
    """Return whether a record is of one of the adapter's loggers."""
    return record.name.partition(".")[0] == "adapter"


def _is_no_caller_who_left(record: logging.LogRecord) -> bool:
    """Filter out what grpc logs when an answer is ready and its caller has disconnected.

    That is no error, as frequent as callers' short deadlines are, and each case is counted already.
    """
    return not _read_event(record).startswith("ExecuteBatchError raised in core by servicer method")


class JsonFormatter(logging.Formatter):
    """Formats a line as JSON, in ASCII: lone surrogates and the stream's encoding do not matter."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, bounded in length."""
        fields = {
            "time": _format_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": _read_event(record),
            **_list_fields(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)[-_MAX_CHARACTERS:]
        try:
            line = _ENCODER.encode(fields)
            if len(line) <= _MAX_CHARACTERS:
                return line
        except (TypeError, ValueError, RecursionError):
            pass
        # a field may have to be cut, or has no form in JSON: write each by itself
        return (
            "{" + ", ".join(f"{_to_json(str(k))}: {_to_json(v)}" for k, v in fields.items()) + "}"
        )


class TextFormatter(logging.Formatter):
    """Formats lines for people.

    As in `12:34:56.789 warning model.load_failed model_id=fraud reason="no such file"`. Lines of
    the embedded Triton are bare: `12:34:56.789 info    triton | loading: digits:1`.
    """

    def __init__(self, *, is_coloured: bool = False) -> None:
        super().__init__()
        self._is_coloured = is_coloured

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with the traceback of an exception below it."""
        event = _read_event(record)
        head = f"{_format_time(record)[11:23]} {self._format_level(record)}"
        triton_line = getattr(record, "line", None)
        if event == "triton.log" and isinstance(triton_line, str):
            return f"{head} triton | {_escape(_cut(_strip_stamp(triton_line))).rstrip()}"
        fields = (f"{k}={_quote_unless_plain(v)}" for k, v in _list_fields(record).items())
        line = " ".join([head, _escape(event), *fields])
        if record.exc_info:
            line += "\n" + _escape(self.formatException(record.exc_info)[-_MAX_CHARACTERS:])
        return line

    def _format_level(self, record: logging.LogRecord) -> str:
        """Return the level, padded, in its colour on a terminal."""
        level = record.levelname.lower()
        colour = _COLOURS.get(level) if self._is_coloured else None
        return f"\033[{colour}m{level:<7}\033[0m" if colour else f"{level:<7}"


def _strip_stamp(line: str) -> str:
    """Return Triton's own text: without its stamp, and without the quotes that newer ones put."""
    stamp = _TRITONS_STAMP.match(line)
    text = line[stamp.end() :] if stamp else line
    if stamp and text.startswith('"'):
        try:
            return str(json.loads(text))
        except ValueError:
            return text
    return text


def _format_time(record: logging.LogRecord) -> str:
    """Return the time of a record, as ISO 8601 in UTC."""
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _read_event(record: logging.LogRecord) -> str:
    """Return the name of the event, or the text of a library's record."""
    try:
        return _cut(record.getMessage())
    except Exception:  # noqa: BLE001 - arguments that do not fit must not lose the line
        return _cut(_to_text(record.msg))


def _list_fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields given by `extra`. They cannot replace those of every line."""
    own = {"time", "level", "logger", "event", "exception"}
    return {
        (f"{key}_" if key in own else key): value
        for key, value in vars(record).items()
        if key not in _STANDARD
    }


def _to_json(value: object) -> str:
    """Return a value as JSON, or its text as JSON where it has no form there."""
    if isinstance(value, str):
        return json.dumps(_cut(value))
    try:
        written = json.dumps(value, default=_convert, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # odd keys, NaN, a value inside itself
        return json.dumps(_cut(_to_text(value)))
    # a long list, or an object with much in it, becomes a text
    return written if len(written) <= _MAX_CHARACTERS else json.dumps(_cut(written))


def _cut(text: str) -> str:
    """Bound the length of a field, whatever a caller has sent."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]} ... ({len(text) - _MAX_CHARACTERS} characters cut)"


def _convert(value: object) -> object:
    """Return a value that JSON has no form for as one that it has: a set as a sorted list."""
    return sorted(map(_to_text, value)) if isinstance(value, set | frozenset) else _to_text(value)


def _to_text(value: object) -> str:
    """Return a value as text, whatever its class makes of that."""
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a log line must not break the work that it is about
        return f"<{type(value).__name__}>"


def _quote_unless_plain(value: object) -> str:
    """Quote the value unless it is one plain word, so that it cannot look like another field."""
    if isinstance(value, Mapping):
        value = " ".join(f"{_to_text(key)}:{_to_text(each)}" for key, each in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        value = ", ".join(map(_to_text, value))
    text = _cut(_to_text(value))
    return text if text.isascii() and _BARE.fullmatch(text) else _to_json(text)


def _escape(text: str) -> str:
    """Escape what a terminal or the stream cannot show."""
    shown = "".join(c if c in "\n\t" or c.isprintable() else _to_json(c)[1:-1] for c in text)
    return shown.encode("ascii", "backslashreplace").decode()


_ENCODER = json.JSONEncoder(default=_convert, allow_nan=False)


def _call_later(seconds: float, act: Callable[[], None]) -> None:
    """Call a function after some seconds."""
    asyncio.get_running_loop().call_later(seconds, act)


class LogLimit:
    """Keeps many requests that fail alike from filling the log, and from paying for a line each.

    Each class of error has 20 lines in a second, and one in each second while there are more; at
    debug it has all. It logs how many more there were.
    """

    def __init__(
        self,
        listener: str,
        *,
        call_later: Callable[[float, Callable[[], None]], None] = _call_later,
    ) -> None:
        self._listener = listener
        self._call_later = call_later
        self._counts: dict[_Kind, int] = {}
        self._flood: set[_Kind] = set()  # of the last second

    def admits(self, error: Exception, level: int) -> bool:
        """Count a line of `level` about the error; return whether to write it."""
        if log.isEnabledFor(logging.DEBUG):
            return True
        model_id = error.model_id if isinstance(error, _OF_MODEL) else None
        key = (type(error), level, model_id)
        if not self._counts:
            self._call_later(_SECONDS, self._sum_up)
        count = self._counts.get(key, 0) + 1
        self._counts[key] = count
        return count <= (1 if key in self._flood else _LINES)

    def _sum_up(self) -> None:
        """Log how many more requests failed alike in the last second, and begin another."""
        counts = self._counts
        last_flood = self._flood
        self._counts = {}
        self._flood = {key for key, count in counts.items() if count > _LINES}
        for key, count in counts.items():
            kind, level, model_id = key
            more = count - (1 if key in last_flood else _LINES)
            if more <= 0:
                continue
            fields: dict[str, object] = {
                "listener": self._listener,
                "error": kind.__name__,
                "requests": more,
            }
            if model_id:
                fields["model_id"] = model_id
            log.log(level, "request.failed_again", extra=fields)


class LogStream(io.TextIOBase):
    """Writes lines in a thread of its own, and so never blocks on its reader.

    While the reader stands still, some thousand lines are buffered; more are dropped and counted,
    and one line reports the count when it reads again.
    """

    lost = 0  # lines dropped by all streams of this process

    def __init__(self, descriptor: int, *, is_terminal: bool = False) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._is_terminal = is_terminal
        self._news = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._bytes = 0  # of buffered lines and those being written
        self._dropped = 0
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    def isatty(self) -> bool:
        """Return whether the lines go to a terminal."""
        return self._is_terminal

    def write(self, text: str) -> int:
        """Buffer a line, or drop it if the buffer is full."""
        data = text.encode(errors="backslashreplace")
        with self._news:
            if len(self._lines) >= _MAX_LINES or self._bytes + len(data) > _MAX_BYTES:
                self._dropped += 1
                LogStream.lost += 1
            else:
                self._lines.append(data)
                self._bytes += len(data)
                self._news.notify_all()
        return len(text)

    def drain(self, seconds: float) -> None:
        """Wait until all lines are written, for `seconds` at most.

        The thread need not be ended: it does not keep the process alive.
        """
        with self._news:
            self._news.wait_for(lambda: not self._bytes, seconds)

    def _run(self) -> None:
        """Write buffered lines for ever; run by the thread."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._lines)
            clock.sleep(_GATHER_SECONDS)
            with self._news:
                data = b"".join(self._lines)
                self._lines.clear()
            self._write_out(data)
            with self._news:
                self._bytes -= len(data)
                dropped = self._dropped
                self._dropped = 0
                self._news.notify_all()
            if dropped:
                log.warning("log.dropped", extra={"lines": dropped})

    def _write_out(self, data: bytes) -> None:
        """Write all bytes to the descriptor, however long the reader takes."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process made the descriptor non-blocking
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll(_POLL_MILLISECONDS)
            except OSError:  # the reader has closed the pipe
                return


def ids_of_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the request ids in `headers` as log fields; names are compared without case."""
    fields = {
        field: headers[name][:_MAX_ID_CHARACTERS]
        for name, field in _FIELDS.items()
        if name in headers
    }
    trace = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if trace is not None:
        fields["trace_id"] = trace[1]
    return fields


def ids_of_metadata(metadata: RpcMetadata) -> dict[str, str]:
    """Return the request ids in the metadata of a gRPC call as log fields."""
    return ids_of_headers({key: value for key, value in metadata if isinstance(value, str)})

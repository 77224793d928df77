"""Keeps what was learned about packages in a file, from one run to the next.

The file lies in Triton's repository, which outlives the process wherever the models do. Triton
takes only folders for models and ignores files beside them (seen on 2.51).
"""

import json
import logging
import threading
from contextlib import suppress
from pathlib import Path

from adapter.runtime.threads import REPOSITORY

FILE_NAME = ".triton-adapter-sizes.json"

log = logging.getLogger(__name__)


class LearnedFile:
    """The sizes file. Losing it only means learning anew, so disk failures are not errors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_failing = False
        self._saving = threading.Lock()  # a save whose caller went away may still run

    def load(self) -> object:
        """Return the parsed JSON saved last; None if there is nothing to read.

        An invalid file is renamed, with the suffix `.bad`.
        """
        try:
            return json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._log_unreadable(str(error.strerror))
        except (ValueError, RecursionError) as error:
            with suppress(OSError):
                self._path.replace(self._with_suffix(".bad"))
            self._log_unreadable(str(error))
        return None

    async def save(self, data: object) -> None:
        """Replace the file atomically by `data`, which must be serialisable as JSON.

        A failure of the disk is logged once, until a save succeeds.
        """
        await REPOSITORY.run(self._save, data)

    def _save(self, data: object) -> None:
        text = _json(data)
        draft = self._with_suffix(".new")
        with self._saving:
            try:
                draft.write_text(text)
                draft.replace(self._path)
            except OSError as error:
                with suppress(OSError):
                    draft.unlink(missing_ok=True)
                if not self._is_failing:
                    fields = {"path": str(self._path), "reason": error.strerror}
                    log.warning("memory.sizes_unwritable", extra=fields)
                self._is_failing = True
            else:
                self._is_failing = False

    def _with_suffix(self, ending: str) -> Path:
        return self._path.with_name(self._path.name + ending)

    def _log_unreadable(self, reason: str) -> None:
        fields = {"path": str(self._path), "reason": reason}
        log.warning("memory.sizes_unreadable", extra=fields)


def _json(data: object) -> str:
    """Serialise in pieces: json.dumps holds the interpreter lock until it returns."""
    if isinstance(data, dict):
        parts = (f"{json.dumps(str(key))}: {_json(value)}" for key, value in data.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(data, list):
        return "[" + ", ".join(map(json.dumps, data)) + "]"
    return json.dumps(data)

"""The file that keeps what was learned about packages from one run to the next.

It lies in Triton's repository, which outlives the process wherever the models do. Triton takes
folders alone for models, and passes over files beside them (seen on 2.51).
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
    """To do without it costs no more than learning anew, so no failure of the disk is an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_failing = False
        self._saving = threading.Lock()  # a save whose caller went away may still run

    def load(self) -> object:
        """What was saved last, as JSON gives it; None when there is nothing that can be read.

        What is no JSON is moved aside, to the same name with `.bad`.
        """
        try:
            return json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._log_unreadable(str(error.strerror))
        except (ValueError, RecursionError) as error:
            with suppress(OSError):
                self._path.replace(self._beside(".bad"))
            self._log_unreadable(str(error))
        return None

    async def save(self, data: object) -> None:
        """Replace the file in one step by `data`, which must be fit for JSON.

        A disk that refuses is said once, until it takes it again.
        """
        await REPOSITORY.run(self._save, data)

    def _save(self, data: object) -> None:
        text = _json(data)
        draft = self._beside(".new")
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

    def _beside(self, ending: str) -> Path:
        return self._path.with_name(self._path.name + ending)

    def _log_unreadable(self, reason: str) -> None:
        fields = {"path": str(self._path), "reason": reason}
        log.warning("memory.sizes_unreadable", extra=fields)


def _json(data: object) -> str:
    """In pieces: nothing else in this process has a turn before a call of json.dumps is done."""
    if isinstance(data, dict):
        parts = (f"{json.dumps(str(key))}: {_json(value)}" for key, value in data.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(data, list):
        return "[" + ", ".join(map(json.dumps, data)) + "]"
    return json.dumps(data)

"""Refuses parameters in the JSON of an inference that end Triton, or that its caller may not use.

`classification` of an output of strings is a division by zero in Triton 2.51, and of an output
without elements, over HTTP, it frees a buffer that is not there. A region of shared memory may be
that of another caller.
"""

import json
import re
from typing import Any

from adapter.core.registry import ModelRecord
from adapter.core.triton_input import CLASSIFICATION, REGION, classification_refusal, region_refusal
from adapter.errors import InvalidRequest

_CLASSIFICATION = CLASSIFICATION.encode()
_REGION = REGION.encode()
_ESCAPED = b"\\u00"  # how each letter of a key may be written instead
_WHOLE_BYTES = 2**16  # of JSON before raw tensors, which is judged as a whole


def _spellings(key: str) -> re.Pattern[bytes]:
    letters = "".join(rf"(?:{letter}|\\u00(?i:{ord(letter):02x}))" for letter in key)
    return re.compile(f'"{letters}"'.encode())


_CLASSIFICATION_KEY = _spellings(CLASSIFICATION)
_REGION_KEY = _spellings(REGION)
_LONGEST_KEY = 6 * len(REGION) + 2


def check_parameters(
    text: bytes, record: ModelRecord, *, shares_memory: bool, is_whole: bool = True
) -> None:
    """Raise InvalidRequest for the JSON of a request that breaks a rule. In a part of JSON that is
    too long to be judged as a whole, a string of the letters of a parameter counts as one.
    """
    if _CLASSIFICATION not in text and _ESCAPED not in text and _REGION not in text:
        return
    if not shares_memory and _REGION_KEY.search(text):
        raise region_refusal()
    outputs = None if record.unclassified is None else record.unclassified.over_http
    if outputs == frozenset() or not _CLASSIFICATION_KEY.search(text):
        return
    if not is_whole:
        raise classification_refusal("an output of the model")
    _check_outputs(text, outputs)


def _check_outputs(text: bytes, outputs: frozenset[str] | None) -> None:
    """Look at every member of each object: of several with one key Triton takes another one than
    Python does.
    """

    def is_classifying(members: list[tuple[str, Any]]) -> bool:
        if ("parameters", True) in members:
            for key, name in members:
                # Triton reads no name beyond a null byte
                if key == "name" and (outputs is None or str(name).partition("\0")[0] in outputs):
                    raise classification_refusal(f"output {name!r}")
        return any(key == CLASSIFICATION for key, _ in members)

    try:
        json.loads(
            text.decode("utf-8", "surrogateescape"), strict=False, object_pairs_hook=is_classifying
        )
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the JSON cannot be read: {str(error)[:200]}") from error


class StreamedParametersCheck:
    """Checks JSON that comes in pieces. Raw tensors may follow JSON that is short enough to be
    judged as a whole.
    """

    def __init__(
        self,
        record: ModelRecord,
        json_bytes: int | None,  # of the body, None for all
        *,
        shares_memory: bool,
    ) -> None:
        self._record = record
        self._shares_memory = shares_memory
        self._size = json_bytes
        self._is_whole = json_bytes is not None and json_bytes <= _WHOLE_BYTES
        self._text = b""

    def feed(self, piece: bytes) -> None:
        """Raise InvalidRequest before the piece is passed on with which a request breaks a rule."""
        self._text += piece
        if self._is_whole and len(self._text) != self._size:
            return
        check_parameters(
            self._text,
            self._record,
            shares_memory=self._shares_memory,
            is_whole=self._is_whole,
        )
        self._text = self._text[-_LONGEST_KEY:]

"""Refuses parameters in the JSON of an inference that end Triton, or that its caller may not use.

`classification` of an output of strings is a division by zero in Triton 2.51, and of an output
without elements, over HTTP, it frees a buffer that is not there. A region of shared memory may be
that of another caller.
"""

import json
import re
from typing import Any

from adapter.core.calls import ServedModel
from adapter.core.triton_input import (
    CLASSIFICATION,
    REGION,
    Unclassified,
    make_classification_refusal,
    make_region_refusal,
)
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


def check_parameters(text: bytes, record: ServedModel, *, shares_memory: bool) -> None:
    """Raise InvalidRequest for the whole JSON of a request that breaks a rule."""
    if not _mentions_parameter(text):
        return
    if not shares_memory and _REGION_KEY.search(text):
        raise make_region_refusal()
    outputs = record.unclassified
    can_be_refused = outputs is None or outputs.list_refused(has_empty_input=True)
    if can_be_refused and _CLASSIFICATION_KEY.search(text):
        _check_classification(text, outputs)


def _mentions_parameter(text: bytes) -> bool:
    return _CLASSIFICATION in text or _ESCAPED in text or _REGION in text


def _check_classification(text: bytes, outputs: Unclassified | None) -> None:
    """Raise InvalidRequest if the JSON classifies an output of which Triton may end.

    Those are all outputs while `outputs` is None. Every member of each object is looked at: of
    several with one key Triton takes another one than Python does.
    """
    classified: list[str] = []  # names of outputs
    shapes: list[Any] = []

    def is_classifying(members: list[tuple[str, Any]]) -> bool:
        if ("parameters", True) in members:
            classified.extend(str(value) for key, value in members if key == "name")
        shapes.extend(value for key, value in members if key == "shape")
        return any(key == CLASSIFICATION for key, _ in members)

    try:
        json.loads(
            text.decode("utf-8", "surrogateescape"), strict=False, object_pairs_hook=is_classifying
        )
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the JSON cannot be read: {str(error)[:200]}") from error
    has_empty_input = any(isinstance(shape, list) and 0 in shape for shape in shapes)
    refused = None if outputs is None else outputs.list_refused(has_empty_input=has_empty_input)
    for name in classified:
        # Triton reads no name beyond a null byte
        if refused is None or name.partition("\0")[0] in refused:
            raise make_classification_refusal(f"output {name!r}")


class StreamedParametersCheck:
    """Checks JSON that comes in pieces. Raw tensors may follow JSON that is short enough to be
    judged as a whole.
    """

    def __init__(
        self,
        record: ServedModel,
        json_bytes: int | None,  # of the body, None for all
        *,
        shares_memory: bool,
    ) -> None:
        self._record = record
        self._shares_memory = shares_memory
        self._size = json_bytes
        self._is_whole = json_bytes is not None and json_bytes <= _WHOLE_BYTES
        self._has_classification = False
        self._text = b""

    def feed(
        self,
        piece: bytes,
        *,
        has_empty_input: bool,  # in this piece or an earlier one
    ) -> None:
        """Raise InvalidRequest before the piece is passed on with which a request breaks a rule.

        In JSON that is too long to be judged as a whole, a string of the letters of a parameter
        counts as one.
        """
        self._text += piece
        if self._is_whole:
            if len(self._text) == self._size:
                check_parameters(self._text, self._record, shares_memory=self._shares_memory)
            return
        if _mentions_parameter(self._text):
            if not self._shares_memory and _REGION_KEY.search(self._text):
                raise make_region_refusal()
            if _CLASSIFICATION_KEY.search(self._text):
                self._has_classification = True
        outputs = self._record.unclassified
        if self._has_classification and (
            outputs is None or outputs.list_refused(has_empty_input=has_empty_input)
        ):
            raise make_classification_refusal("an output of the model")
        self._text = self._text[-_LONGEST_KEY:]

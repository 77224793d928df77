"""SageMaker's media type for V2 bodies with raw tensors behind their JSON.

SageMaker strips V2's Inference-Header-Content-Length, so the length of the JSON part travels in
`application/vnd.sagemaker-triton.binary+json;json-header-size=N`, both ways.
"""

import json
import re

from adapter.errors import InvalidRequest

MEDIA_TYPE = "application/vnd.sagemaker-triton.binary+json"
_PARAMETER = "json-header-size"
_DIGITS = re.compile(r"[0-9]{1,19}")


def json_header_bytes(content_type: str, content_length: int | None) -> int | None:
    """Return N of the media type; None when the body is plain JSON, whatever type it claims.

    `content_length` bounds N, None when it is not known beforehand (chunked or compressed).
    """
    kind, _, rest = content_type.partition(";")
    if kind.strip().lower() != MEDIA_TYPE:
        if MEDIA_TYPE in content_type.lower():
            raise InvalidRequest(f"Content-Type {content_type!r} is not {MEDIA_TYPE}")
        return None
    text = next(
        (
            value.strip().strip('"')
            for key, _, value in (part.partition("=") for part in rest.split(";"))
            if key.strip().lower() == _PARAMETER
        ),
        None,
    )
    if text is None or _DIGITS.fullmatch(text) is None:
        raise InvalidRequest(
            f"Content-Type {content_type!r} needs {_PARAMETER}=N, a number of bytes"
        )
    size = int(text)
    if content_length is not None and size > content_length:
        raise InvalidRequest(
            f"{_PARAMETER}={size} is more than the body, which has {content_length} bytes"
        )
    return size


def content_type(json_header_size: int | None) -> str:
    """Return the Content-Type of an inference in SageMaker's contract, by the size of its JSON
    part; None: it is JSON alone.
    """
    if json_header_size is None:
        return "application/json"
    return f"{MEDIA_TYPE};{_PARAMETER}={json_header_size}"


class Begin:
    """Gathers the begin of an answer, to the name of the model in it: with infer behind the id of
    the request, with generate behind the outputs.
    """

    def __init__(self, triton_name: str) -> None:
        self.has_name = False
        self._name = _write_name(triton_name)
        self._pieces: list[bytes] = []
        self._edge = b""  # the end of what was searched, in which the name may begin

    def add(self, piece: bytes) -> None:
        """Add the next piece of the answer."""
        self._pieces.append(piece)
        searched = self._edge + piece
        self.has_name = self.has_name or self._name in searched
        self._edge = searched[-len(self._name) :]

    def join(self) -> bytes:
        """Return what was gathered."""
        return b"".join(self._pieces)


def put_name_back(
    body: bytes,  # of an answer, or the begin of it that has the name
    json_header_size: int | None,
    triton_name: str,
    model_id: str,
) -> tuple[bytes, int | None]:
    """Return the body of Triton's answer with the caller's name of the model in place of Triton's,
    and the new length of its JSON part.

    Within a JSON string the quotes would be escaped, so that only the member itself is found.
    """
    size = len(body) if json_header_size is None else json_header_size
    named = f'"model_name":{json.dumps(model_id)}'.encode()
    header = body[:size].replace(_write_name(triton_name), named, 1)
    changed = header + body[size:]
    if json_header_size is None:
        return changed, None
    return changed, json_header_size + len(changed) - len(body)


def _write_name(triton_name: str) -> bytes:
    """Return the member of an answer that has the model's name."""
    return f'"model_name":"{triton_name}"'.encode()

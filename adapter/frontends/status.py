"""What each error is called in HTTP and in gRPC. The only place that writes a status for one."""

from collections.abc import Mapping
from typing import TypeVar

import grpc

from adapter import errors

T = TypeVar("T")

# (status, the `code` in the body); interface: docs/errors.md
HTTP: Mapping[type[BaseException], tuple[int, str]] = {
    errors.InvalidRequest: (400, "InvalidRequest"),
    errors.SlowBody: (408, "SlowBody"),
    errors.MethodNotAllowed: (405, "MethodNotAllowed"),
    errors.NotPassedThrough: (403, "NotPassedThrough"),
    errors.NotStarted: (503, "NotStarted"),
    errors.NotTaken: (503, "NotTaken"),
    errors.InvalidModel: (400, "InvalidModel"),
    errors.LoadFailed: (400, "InvalidModel"),  # Triton refused it: 400 at its own door too
    errors.ModelTooLarge: (400, "ModelTooLarge"),  # not 507: that would evict others for nothing
    errors.ModelNotFound: (404, "ModelNotFound"),
    errors.SourceMissing: (404, "SourceMissing"),
    errors.AlreadyLoaded: (409, "AlreadyLoaded"),
    errors.PayloadTooLarge: (413, "PayloadTooLarge"),
    errors.InferenceFailed: (500, "InferenceFailed"),
    errors.ModelNotReady: (503, "ModelNotReady"),
    errors.BackendUnavailable: (503, "BackendUnavailable"),
    errors.TooManyAbandoned: (503, "TooManyAbandoned"),
    errors.TooManyConnections: (503, "TooManyConnections"),
    errors.BackendError: (503, "BackendUnavailable"),
    errors.BackendTimeout: (504, "BackendTimeout"),
    errors.InsufficientMemory: (507, "InsufficientMemory"),
    errors.OutOfMemory: (507, "OutOfMemory"),
}

# ModelMesh acts on these codes (docs/modelmesh.md, What a mesh does with a code):
# RESOURCE_EXHAUSTED makes it try another copy, NOT_FOUND load again, UNAVAILABLE try eight times
# and say INTERNAL.
GRPC: Mapping[type[BaseException], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidModel: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SourceMissing: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PayloadTooLarge: grpc.StatusCode.INVALID_ARGUMENT,  # another copy would say the same
    errors.MessageTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,  # as grpc itself has it
    errors.NotPassedThrough: grpc.StatusCode.PERMISSION_DENIED,
    errors.ModelTooLarge: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyLoaded: grpc.StatusCode.ALREADY_EXISTS,
    errors.NotStarted: grpc.StatusCode.UNAVAILABLE,
    errors.NotTaken: grpc.StatusCode.UNAVAILABLE,
    errors.ModelNotReady: grpc.StatusCode.UNAVAILABLE,
    errors.BackendUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.TooManyAbandoned: grpc.StatusCode.UNAVAILABLE,
    errors.TooManyConnections: grpc.StatusCode.UNAVAILABLE,  # by grpc: the connection is closed
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,  # another copy has room
    errors.BackendError: grpc.StatusCode.INTERNAL,
    errors.BackendTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.InsufficientMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

# grpc allows 8 KiB for all metadata of an answer, 32 bytes an entry included, and turns what is
# over into RESOURCE_EXHAUSTED; the rest is for the other entries.
_MAX_TEXT_BYTES = 7 * 2**10


def lookup(table: Mapping[type[BaseException], T], error: BaseException) -> T | None:
    """The entry of the nearest class along the error's ancestry; None for a bug."""
    return next((table[kind] for kind in type(error).__mro__ if kind in table), None)


def grpc_status(error: errors.AdapterError) -> tuple[grpc.StatusCode, str]:
    """The code, and a text that fits into an answer's metadata."""
    return lookup(GRPC, error) or grpc.StatusCode.INTERNAL, _cut(grpc_text(error))


def grpc_text(error: errors.AdapterError) -> str:
    """The noun for the error, and the error.

    ModelMesh takes some texts for NOT_FOUND by their first words, `Request for unknown model` and
    `Model `. None of ours starts so, whatever Triton or a model said.
    """
    noun = (lookup(HTTP, error) or (500, "InternalError"))[1]
    return f"{noun}: {error}".encode("utf-8", "backslashreplace").decode()


def _cut(text: str) -> str:
    """What fits, as gRPC encodes it: UTF-8, and all but printable ASCII as %XX."""
    sizes = [_encoded_bytes(character) for character in text[: _MAX_TEXT_BYTES + 1]]
    if len(text) <= _MAX_TEXT_BYTES and sum(sizes) <= _MAX_TEXT_BYTES:
        return text
    kept, room = 0, _MAX_TEXT_BYTES - len(_cut_mark(len(text)))
    while kept < len(sizes) and sizes[kept] <= room:
        room -= sizes[kept]
        kept += 1
    return text[:kept] + _cut_mark(len(text) - kept)


def _cut_mark(characters: int) -> str:
    return f" ... ({characters} characters cut)"


def _encoded_bytes(character: str) -> int:
    if " " <= character <= "~" and character != "%":
        return 1
    return 3 * len(character.encode())

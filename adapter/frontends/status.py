"""Maps each error to its HTTP and gRPC status. No other module does."""

import logging
from collections.abc import Mapping
from typing import TypeVar

import grpc

from adapter import errors

T = TypeVar("T")

# (status, the `code` in the body); interface: docs/errors.md
HTTP: Mapping[type[BaseException], tuple[int, str]] = {
    errors.InvalidRequest: (400, "InvalidRequest"),
    errors.SlowBody: (408, "SlowBody"),
    errors.AlreadyRegistered: (400, "AlreadyRegistered"),
    errors.MethodNotAllowed: (405, "MethodNotAllowed"),
    errors.UnsupportedMediaType: (415, "UnsupportedMediaType"),
    errors.NotAcceptable: (406, "NotAcceptable"),
    errors.Forbidden: (403, "Forbidden"),
    errors.Unauthenticated: (401, "Unauthenticated"),
    errors.InferenceOnly: (403, "InferenceOnly"),
    errors.InlineFilesOff: (403, "InlineFilesOff"),
    errors.NotPassedThrough: (403, "NotPassedThrough"),
    errors.NotStarted: (503, "NotStarted"),
    errors.NotTaken: (503, "NotTaken"),
    errors.InvalidModel: (400, "InvalidModel"),
    errors.LoadFailed: (400, "InvalidModel"),  # Triton refused it: 400 at its own port too
    errors.GivenUp: (503, "GivenUp"),  # for some minutes, unless a person tries it
    errors.ModelTooLarge: (400, "ModelTooLarge"),  # not 507: that would evict others for nothing
    errors.ModelNotFound: (404, "ModelNotFound"),
    errors.ArtifactNotFound: (404, "ArtifactNotFound"),
    errors.NotRegistered: (404, "NotRegistered"),
    errors.SourceMissing: (404, "SourceMissing"),
    errors.AlreadyLoaded: (409, "AlreadyLoaded"),
    errors.UnloadedMeanwhile: (409, "UnloadedMeanwhile"),
    errors.PayloadTooLarge: (413, "PayloadTooLarge"),
    errors.InferenceFailed: (500, "InferenceFailed"),
    errors.StoreDenied: (502, "StoreDenied"),
    errors.StoreUnavailable: (503, "StoreUnavailable"),
    errors.NoRoom: (503, "NoRoom"),
    errors.TooManyWaiting: (503, "TooManyWaiting"),
    errors.ModelNotReady: (503, "ModelNotReady"),
    errors.BackendUnavailable: (503, "BackendUnavailable"),
    errors.TooManyConnections: (503, "TooManyConnections"),
    errors.BackendError: (503, "BackendUnavailable"),
    errors.BackendTimeout: (504, "BackendTimeout"),
    errors.InsufficientMemory: (507, "InsufficientMemory"),
    errors.OutOfMemory: (507, "OutOfMemory"),
}

# (status, code) of InvokeEndpoint (docs/endpoint.md). MODEL_ERROR: what the model's container would
# have answered, by the table above, is in the body.
MODEL_ERROR = (424, "ModelError")
_INVALID, _DENIED = (400, "ValidationError"), (403, "AccessDeniedException")
_LATER = (503, "ServiceUnavailable")  # boto3 sends the request again
AWS: Mapping[type[BaseException], tuple[int, str]] = {
    errors.InvalidCall: _INVALID,
    errors.UnknownOperation: (404, "UnknownOperationException"),
    errors.PayloadTooLarge: _INVALID,
    errors.BrokenBody: _INVALID,
    errors.SlowBody: _INVALID,
    errors.ArtifactNotFound: _INVALID,
    errors.InvalidArtifact: _INVALID,
    errors.Forbidden: _DENIED,
    errors.InvalidSignature: (403, "InvalidSignatureException"),
    errors.ModelNotReady: (429, "ModelNotReadyException"),
    errors.NoRoom: _LATER,
    errors.TooManyWaiting: _LATER,
    errors.TooManyConnections: _LATER,
    errors.StoreUnavailable: _LATER,
    errors.StoreDenied: (530, "InternalDependencyException"),
    errors.ModelNotFound: _LATER,  # Triton has lost it: it is loaded again
    errors.UnloadedMeanwhile: _LATER,  # the next call loads it
    errors.NotStarted: _LATER,
    errors.BackendUnavailable: _LATER,
    errors.BackendTimeout: MODEL_ERROR,
    errors.ModelFailed: MODEL_ERROR,
    errors.AboutMemory: MODEL_ERROR,
    errors.CallerError: MODEL_ERROR,  # by a body or a package that the container refuses
    errors.AdapterError: (500, "InternalFailure"),
}

# ModelMesh acts on these codes (docs/modelmesh.md, What ModelMesh does with a code):
# RESOURCE_EXHAUSTED makes it try another copy, NOT_FOUND load again, UNAVAILABLE try eight times
# and say INTERNAL.
GRPC: Mapping[type[BaseException], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.IncompleteMessage: grpc.StatusCode.INTERNAL,  # as Triton and grpc have it
    errors.AlreadyRegistered: grpc.StatusCode.ALREADY_EXISTS,
    errors.UnknownEncoding: grpc.StatusCode.UNIMPLEMENTED,  # as the compression of gRPC has it
    errors.InvalidModel: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SourceMissing: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PayloadTooLarge: grpc.StatusCode.INVALID_ARGUMENT,  # another copy would say the same
    errors.MessageTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,  # as grpc itself has it
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.InferenceOnly: grpc.StatusCode.PERMISSION_DENIED,
    errors.InlineFilesOff: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotPassedThrough: grpc.StatusCode.PERMISSION_DENIED,
    errors.GivenUp: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelTooLarge: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.ArtifactNotFound: grpc.StatusCode.NOT_FOUND,
    errors.NotRegistered: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyLoaded: grpc.StatusCode.ALREADY_EXISTS,
    errors.UnloadedMeanwhile: grpc.StatusCode.ABORTED,
    errors.NotStarted: grpc.StatusCode.UNAVAILABLE,
    errors.NotTaken: grpc.StatusCode.UNAVAILABLE,
    errors.StoreDenied: grpc.StatusCode.FAILED_PRECONDITION,  # an operator has to act
    errors.StoreUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.NoRoom: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TooManyWaiting: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TooManyStreams: grpc.StatusCode.UNAVAILABLE,  # clients open a stream again
    errors.ModelNotReady: grpc.StatusCode.UNAVAILABLE,
    errors.BackendUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.TooManyConnections: grpc.StatusCode.UNAVAILABLE,  # by grpc: the connection is closed
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,  # another copy has room
    errors.BackendError: grpc.StatusCode.INTERNAL,
    errors.BackendTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.InsufficientMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

_UNKNOWN_MODEL = (errors.ModelNotFound, errors.ArtifactNotFound)

# grpc allows 8 KiB for all metadata of an answer, 32 bytes an entry included, and turns what is
# over into RESOURCE_EXHAUSTED; the rest is for the other entries.
_MAX_TEXT_BYTES = 7 * 2**10
_SURELY_FITS = _MAX_TEXT_BYTES // 12  # characters: of four bytes in UTF-8, each as %XX


def challenge(error: errors.Unauthenticated) -> str:
    """The header WWW-Authenticate (RFC 6750, section 3)."""
    realm = 'Bearer realm="triton-adapter"'
    return f'{realm}, error="invalid_token"' if error.is_wrong else realm


def lookup(table: Mapping[type[BaseException], T], error: BaseException) -> T | None:
    """The entry of the nearest class along the error's ancestry; None for a bug."""
    kind = type(error)
    return table[kind] if kind in table else of_kind(table, kind)  # the walk takes 1 us


def of_kind(table: Mapping[type[BaseException], T], error: type[BaseException]) -> T | None:
    return next((table[kind] for kind in error.__mro__ if kind in table), None)


def aws_status(error: errors.AdapterError) -> tuple[int, str]:
    """The status and the code of InvokeEndpoint. A request during which Triton ended is its model's
    error: it may be what ended Triton, and clients and proxies send a 503 again.
    """
    had_it = isinstance(error, errors.BackendUnavailable) and error.delivered
    if had_it and not isinstance(error, errors.Overloaded):
        return MODEL_ERROR
    return lookup(AWS, error) or (500, "InternalFailure")


def level_of(error: errors.AdapterError) -> int:
    """The level of `request.failed` in the log."""
    if error.is_logged:
        return logging.DEBUG
    return logging.INFO if errors.was_refused(error) else logging.WARNING


def grpc_status(
    error: errors.AdapterError, *, is_of_mesh: bool = False
) -> tuple[grpc.StatusCode, str]:
    """The code, and a text that fits into an answer's metadata."""
    return grpc_code(error), _cut(grpc_text(error, is_of_mesh=is_of_mesh))


def grpc_code(error: errors.AdapterError) -> grpc.StatusCode:
    if error.own_code is not None:
        return grpc.StatusCode[error.own_code]
    return lookup(GRPC, error) or grpc.StatusCode.INTERNAL


def grpc_text(error: errors.AdapterError, *, is_of_mesh: bool) -> str:
    """The noun for the error, and the error. Of an unknown model Triton's words stand first, as
    clients look for them.

    ModelMesh takes some texts for NOT_FOUND by their first words, `Request for unknown model` and
    `Model `. None that it gets starts so, whatever Triton or a model said.
    """
    noun = (lookup(HTTP, error) or (500, "InternalError"))[1]
    text = f"{noun}: {error}"
    if isinstance(error, _UNKNOWN_MODEL) and error.model_id and not is_of_mesh:
        text = f"Request for unknown model: '{error.model_id}' is not found; {text}"
    return text.encode("utf-8", "backslashreplace").decode()


def _cut(text: str) -> str:
    """What fits, as gRPC encodes it: UTF-8, and all but printable ASCII as %XX."""
    if len(text) <= _SURELY_FITS:
        return text
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

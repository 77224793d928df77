"""Maps each error to its HTTP, gRPC and AWS status, in one table. No other module does."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import grpc

from adapter import errors

T = TypeVar("T")

# (status, code) of InvokeEndpoint (docs/endpoint.md)
AwsStatus = tuple[int, str]
# The body has what the model's container would have answered.
MODEL_ERROR: AwsStatus = (424, "ModelError")
_INVALID: AwsStatus = (400, "ValidationError")
_DENIED: AwsStatus = (403, "AccessDeniedException")
_LATER: AwsStatus = (503, "ServiceUnavailable")  # boto3 sends the request again
_INTERNAL: AwsStatus = (500, "InternalFailure")
_Rpc = grpc.StatusCode


@dataclass(frozen=True, slots=True)
class Answer:
    """Says what callers get for a class of errors, and what they can do."""

    status: int
    code: str  # in the body; interface: docs/errors.md
    grpc: grpc.StatusCode
    when: str
    remedy: str
    aws: AwsStatus = MODEL_ERROR


# A class without a row is answered as its nearest ancestor here. docs/errors.md is made of it.
#
# ModelMesh acts on the codes of gRPC (docs/modelmesh.md, What ModelMesh does with a code):
# RESOURCE_EXHAUSTED makes it try another copy, NOT_FOUND load again, UNAVAILABLE try eight times
# and say INTERNAL.
ANSWERS: Mapping[type[BaseException], Answer] = {
    errors.InvalidRequest: Answer(
        400,
        "InvalidRequest",
        _Rpc.INVALID_ARGUMENT,
        "body, header, name, path or Triton's check of the inputs; `url` outside `model_roots`",
        "fix the request; the text says what is wrong",
    ),
    errors.InvalidCall: Answer(
        400,
        "InvalidRequest",
        _Rpc.INVALID_ARGUMENT,
        "a call of the endpoint is malformed, before its model was asked",
        "fix the request; the text says what is wrong",
        _INVALID,
    ),
    errors.UnknownOperation: Answer(
        400,
        "InvalidRequest",
        _Rpc.INVALID_ARGUMENT,
        "the endpoint has no such path or method",
        "call InvokeEndpoint or InvokeEndpointWithResponseStream",
        (404, "UnknownOperationException"),
    ),
    errors.BrokenBody: Answer(
        400,
        "InvalidRequest",
        _Rpc.INVALID_ARGUMENT,
        "the body ends early, stops arriving, or is malformed",
        "send the whole body; a proxy may have cut it",
        _INVALID,
    ),
    errors.SlowBody: Answer(
        408,
        "SlowBody",
        _Rpc.INVALID_ARGUMENT,
        "the body arrives at less than 64 KiB/s for more than 10 s, or for 2 s while others wait;"
        " HTTP connections close",
        "send faster, or less: compress, or use raw tensors",
        _INVALID,
    ),
    # Triton and grpc answer so
    errors.IncompleteMessage: Answer(
        400,
        "InvalidRequest",
        _Rpc.INTERNAL,
        "a gRPC request ended before its message did",
        "send the whole message; a proxy may have cut it",
    ),
    errors.AlreadyRegistered: Answer(
        400,
        "AlreadyRegistered",
        _Rpc.ALREADY_EXISTS,
        "gRPC: Triton has a region of shared memory of this name",
        "take another name, or unregister it",
    ),
    # the protocol of gRPC wants this code
    errors.UnknownEncoding: Answer(
        400,
        "InvalidRequest",
        _Rpc.UNIMPLEMENTED,
        "gRPC: `grpc-encoding` is not identity, deflate or gzip",
        "use one that `grpc-accept-encoding` of the answer names",
    ),
    errors.UnsupportedMediaType: Answer(
        415,
        "UnsupportedMediaType",
        _Rpc.INVALID_ARGUMENT,
        "the model [opted into content types](content-types.md), and not into this one",
        "send one of those that the text and the header `Accept` name",
    ),
    errors.NotAcceptable: Answer(
        406,
        "NotAcceptable",
        _Rpc.INVALID_ARGUMENT,
        "no type of `Accept` fits; only models that opted into [content types](content-types.md)",
        "accept JSON, or one of the types that the text names",
    ),
    errors.MethodNotAllowed: Answer(
        405,
        "MethodNotAllowed",
        _Rpc.INVALID_ARGUMENT,
        "the path exists, not with this method",
        "see `Allow`",
    ),
    errors.Forbidden: Answer(
        403,
        "Forbidden",
        _Rpc.PERMISSION_DENIED,
        "a page of another site, an unknown host on loopback, or no token with `endpoint_keys`",
        "see [browsers](security.md#pages-in-a-browser), [signed calls](endpoint.md#signed-calls)",
        _DENIED,
    ),
    errors.InvalidSignature: Answer(
        403,
        "Forbidden",
        _Rpc.PERMISSION_DENIED,
        "a call of the endpoint is signed wrongly",
        "check key, clock, region and endpoint: [signed calls](endpoint.md#signed-calls)",
        (403, "InvalidSignatureException"),
    ),
    errors.Unauthenticated: Answer(
        401,
        "Unauthenticated",
        _Rpc.UNAUTHENTICATED,
        "`control_token` is set, and a load, unload, drain or call of ModelMesh had none",
        "send `Authorization: Bearer TOKEN`, over gRPC as metadata `authorization`",
    ),
    errors.InferenceOnly: Answer(
        403,
        "InferenceOnly",
        _Rpc.PERMISSION_DENIED,
        "`http_data` serves inference only; this was a load, an unload, a list or the like",
        "send it to `http`",
    ),
    errors.InlineFilesOff: Answer(
        403,
        "InlineFilesOff",
        _Rpc.PERMISSION_DENIED,
        "a load has `file:` parameters, and `inline_files` is off",
        "put the files below a model root and load the folder, or set `inline_files: on`",
    ),
    errors.NotPassedThrough: Answer(
        403,
        "NotPassedThrough",
        _Rpc.PERMISSION_DENIED,
        "a call about the whole of Triton that the setting `passthrough` does not open",
        "set it, if the callers may do that",
    ),
    # by grpc: the connection is closed
    errors.TooManyConnections: Answer(
        503,
        "TooManyConnections",
        _Rpc.UNAVAILABLE,
        "a listener has what open files allow; `http` returns this, gRPC closes the connection",
        "try again in a second (`Retry-After`), over fewer connections; or allow more open files",
        _LATER,
    ),
    errors.TooManyWaiting: Answer(
        503,
        "TooManyWaiting",
        _Rpc.RESOURCE_EXHAUSTED,
        "256 callers wait for models that are being fetched, 32 for one, or no room for a body or"
        " an answer",
        "try again in a while",
        _LATER,
    ),
    # clients open a stream again
    errors.TooManyStreams: Answer(
        503,
        "TooManyWaiting",
        _Rpc.UNAVAILABLE,
        "open streams take all that streams may take: a new one is refused, or the connection"
        " with the most loses its latest one; the text has the figures",
        "end streams that are idle; below 1 GiB raise `max_inflight_body_bytes`",
        _LATER,
    ),
    errors.NoRoom: Answer(
        503,
        "NoRoom",
        _Rpc.RESOURCE_EXHAUSTED,
        "a model does not fit, and everything that could be evicted is in use",
        "try again; if it lasts, give it more memory or disk, or pin less",
        _LATER,
    ),
    # an operator has to act
    errors.StoreDenied: Answer(
        502,
        "StoreDenied",
        _Rpc.FAILED_PRECONDITION,
        "the store refuses the adapter's credentials",
        "check the [credentials](stores.md#credentials) and what they may read",
        (530, "InternalDependencyException"),
    ),
    errors.StoreUnavailable: Answer(
        503,
        "StoreUnavailable",
        _Rpc.UNAVAILABLE,
        "the store cannot be reached, fails, or is too slow",
        "try again; if it lasts, see [stores.md](stores.md#when-something-is-wrong)",
        _LATER,
    ),
    errors.NotStarted: Answer(
        503,
        "NotStarted",
        _Rpc.UNAVAILABLE,
        "the body was still arriving when the model was unloaded or the adapter stopped",
        "send it again, to another copy or when the model is loaded: no work had begun",
        _LATER,
    ),
    errors.NotTaken: Answer(
        503,
        "NotTaken",
        _Rpc.UNAVAILABLE,
        "answers of a stream are not read for 60 s, or 1 s while its model is unloaded or the "
        "adapter stops",
        "open another stream and read it; the answers are lost",
    ),
    # another copy would say the same
    errors.PayloadTooLarge: Answer(
        413,
        "PayloadTooLarge",
        _Rpc.INVALID_ARGUMENT,
        "a body is over `max_body_bytes` (1 MiB for control calls), Triton's limit or a stream's",
        "send less, or raise the limit",
        _INVALID,
    ),
    # grpc itself answers so
    errors.MessageTooLarge: Answer(
        413,
        "PayloadTooLarge",
        _Rpc.RESOURCE_EXHAUSTED,
        "a gRPC message is over one of [its limits](v2.md#grpc)",
        "send less, or raise the limit",
        _INVALID,
    ),
    errors.InvalidModel: Answer(
        400,
        "InvalidModel",
        _Rpc.INVALID_ARGUMENT,
        "the package cannot be served: no config.pbtxt, no version folder, no model file and so on",
        "fix the package; the text names the file and the reason",
    ),
    errors.InvalidArtifact: Answer(
        400,
        "InvalidModel",
        _Rpc.INVALID_ARGUMENT,
        "what the store has of a model cannot be unpacked",
        "put a whole archive or folder there; the text names the reason",
        _INVALID,
    ),
    errors.SourceMissing: Answer(
        404,
        "SourceMissing",
        _Rpc.INVALID_ARGUMENT,
        "the `url` of a load does not exist",
        "check the path, and that the adapter sees the same file system",
    ),
    # Triton has lost it: it is loaded again
    errors.ModelNotFound: Answer(
        404,
        "ModelNotFound",
        _Rpc.NOT_FOUND,
        "the model is not loaded, is being unloaded, or has lost its process",
        "load it; SageMaker and ModelMesh do so automatically",
        _LATER,
    ),
    errors.ArtifactNotFound: Answer(
        404,
        "ArtifactNotFound",
        _Rpc.NOT_FOUND,
        "the store has no model of this key",
        "check the key; a new object is seen within 5 s",
        _INVALID,
    ),
    errors.NotRegistered: Answer(
        404,
        "NotRegistered",
        _Rpc.NOT_FOUND,
        "Triton has no region of shared memory of this name",
        "register it first; a restart of Triton forgets all",
    ),
    errors.AlreadyLoaded: Answer(
        409,
        "AlreadyLoaded",
        _Rpc.ALREADY_EXISTS,
        "a model of this name is loaded or being loaded",
        "use it, or unload it first",
    ),
    errors.ModelNotReady: Answer(
        503,
        "ModelNotReady",
        _Rpc.UNAVAILABLE,
        "the model is being loaded",
        "try again in a while",
        (429, "ModelNotReadyException"),
    ),
    # the next call loads it
    errors.UnloadedMeanwhile: Answer(
        409,
        "UnloadedMeanwhile",
        _Rpc.ABORTED,
        "the model was unloaded while it was being loaded, which ended the load",
        "load it again, if it is still wanted",
        _LATER,
    ),
    # not 507: that would evict others for nothing
    errors.ModelTooLarge: Answer(
        400,
        "ModelTooLarge",
        _Rpc.FAILED_PRECONDITION,
        "the model declares more than a device has, or ran out of memory with nothing else loaded",
        "take a larger device or a smaller model; unloading others does not help",
    ),
    errors.InsufficientMemory: Answer(
        507,
        "InsufficientMemory",
        _Rpc.RESOURCE_EXHAUSTED,
        "the model needs more than is free, by its size or as the load showed (it was undone)",
        "unload another model and load again; SageMaker does so automatically",
    ),
    errors.OutOfMemory: Answer(
        507,
        "OutOfMemory",
        _Rpc.RESOURCE_EXHAUSTED,
        "a load or an inference ran out of memory",
        "unload another model and try again; SageMaker does so automatically",
    ),
    errors.BackendError: Answer(
        503,
        "BackendUnavailable",
        _Rpc.INTERNAL,
        "a folder of the repository cannot be listed or removed; Triton failed to unload, or is "
        "not in explicit mode",
        "read the text; look at the disk and at who may write to it, or restart Triton",
        _INTERNAL,
    ),
    errors.BackendUnavailable: Answer(
        503,
        "BackendUnavailable",
        _Rpc.UNAVAILABLE,
        "Triton cannot be reached; the adapter is starting or draining",
        "try again; if it lasts, see [operations.md](operations.md#it-is-not-ready)",
        _LATER,
    ),
    # another copy has room
    errors.Overloaded: Answer(
        503,
        "BackendUnavailable",
        _Rpc.RESOURCE_EXHAUSTED,
        "a queue of the model is full, or held the request for too long; the model says"
        " UNAVAILABLE; too many loads are in progress; over gRPC, no room for a body",
        "try again, or at another copy; ModelMesh does so automatically",
        _LATER,
    ),
    errors.BackendTimeout: Answer(
        504,
        "BackendTimeout",
        _Rpc.DEADLINE_EXCEEDED,
        "no answer within a time limit of the [settings](settings.md) or the caller's deadline",
        "check whether the model or Triton hangs; raise the limit if the work is long",
    ),
    # Triton refused it: 400 at its own port too
    errors.LoadFailed: Answer(
        400,
        "InvalidModel",
        _Rpc.INTERNAL,
        "Triton refused the model, or its folder could not be written to the repository",
        "read the text, which is Triton's own; the log of Triton may say more",
    ),
    # for some minutes, unless a person tries it
    errors.GivenUp: Answer(
        503,
        "GivenUp",
        _Rpc.FAILED_PRECONDITION,
        "the model was at work at several exits of Triton, and is not loaded for ten minutes",
        "mend it; a load by V2 tries it at once",
    ),
    errors.InferenceFailed: Answer(
        500,
        "InferenceFailed",
        _Rpc.INTERNAL,
        "the model raised, or its python process died (the next call then gets `ModelNotFound`)",
        "read the text, which is the model's own; load the model again if its process has died",
    ),
}
HTTP: Mapping[type[BaseException], tuple[int, str]] = {
    kind: (answer.status, answer.code) for kind, answer in ANSWERS.items()
}
GRPC: Mapping[type[BaseException], grpc.StatusCode] = {
    kind: answer.grpc for kind, answer in ANSWERS.items()
}
AWS: Mapping[type[BaseException], AwsStatus] = {
    kind: answer.aws for kind, answer in ANSWERS.items()
}

_UNKNOWN_MODEL = (errors.ModelNotFound, errors.ArtifactNotFound)

# grpc allows 8 KiB for all metadata of an answer, 32 bytes an entry included, and turns what is
# over into RESOURCE_EXHAUSTED; the rest is for the other entries.
_MAX_TEXT_BYTES = 7 * 2**10
_SURELY_FITS = _MAX_TEXT_BYTES // 12  # characters: of four bytes in UTF-8, each as %XX


def challenge(error: errors.Unauthenticated) -> str:
    """Return the value of the header WWW-Authenticate (RFC 6750, section 3)."""
    realm = 'Bearer realm="triton-adapter"'
    return f'{realm}, error="invalid_token"' if error.is_wrong else realm


def lookup(table: Mapping[type[BaseException], T], error: BaseException) -> T | None:
    """Return the entry of the nearest class along the error's ancestry; None for a bug."""
    kind = type(error)
    return table[kind] if kind in table else lookup_kind(table, kind)  # the walk takes 1 us


def lookup_kind(table: Mapping[type[BaseException], T], error: type[BaseException]) -> T | None:
    """Return the entry of the nearest class along the ancestry of a class of errors."""
    return next((table[kind] for kind in error.__mro__ if kind in table), None)


def aws_status(error: errors.AdapterError) -> tuple[int, str]:
    """Return the status and the code of InvokeEndpoint for an error. A request during which Triton
    has exited is answered as an error of its model: it may be what made Triton exit, and clients
    and proxies send a request again that got 503.
    """
    had_it = isinstance(error, errors.BackendUnavailable) and error.delivered
    if had_it and not isinstance(error, errors.Overloaded):
        return MODEL_ERROR
    return lookup(AWS, error) or _INTERNAL


def level_of(error: errors.AdapterError) -> int:
    """Return the level at which `request.failed` is logged for an error."""
    if error.is_logged:
        return logging.DEBUG
    return logging.INFO if errors.was_refused(error) else logging.WARNING


def grpc_status(
    error: errors.AdapterError, *, is_of_mesh: bool = False
) -> tuple[grpc.StatusCode, str]:
    """Return the gRPC code of an error, and a text that fits into an answer's metadata."""
    return grpc_code(error), _cut(grpc_text(error, is_of_mesh=is_of_mesh))


def grpc_code(error: errors.AdapterError) -> grpc.StatusCode:
    """Return the gRPC code of an error."""
    if error.own_code is not None:
        return grpc.StatusCode[error.own_code]
    return lookup(GRPC, error) or grpc.StatusCode.INTERNAL


def grpc_text(error: errors.AdapterError, *, is_of_mesh: bool) -> str:
    """Return the text for an error: of which kind it is, and its own text. For an unknown model
    Triton's words stand first, as clients look for them.

    ModelMesh takes some texts for NOT_FOUND by their first words, `Request for unknown model` and
    `Model `. None that it gets starts so, whatever Triton or a model said.
    """
    noun = (lookup(HTTP, error) or (500, "InternalError"))[1]
    text = f"{noun}: {error}"
    if isinstance(error, _UNKNOWN_MODEL) and error.model_id and not is_of_mesh:
        text = f"Request for unknown model: '{error.model_id}' is not found; {text}"
    return text.encode("utf-8", "backslashreplace").decode()


def _cut(text: str) -> str:
    """Return as much as fits as gRPC encodes it: UTF-8, and all but printable ASCII as %XX."""
    if len(text) <= _SURELY_FITS:
        return text
    sizes = [_encoded_bytes(character) for character in text[: _MAX_TEXT_BYTES + 1]]
    if len(text) <= _MAX_TEXT_BYTES and sum(sizes) <= _MAX_TEXT_BYTES:
        return text
    kept = 0
    room = _MAX_TEXT_BYTES - len(_cut_mark(len(text)))
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

"""What each error is called in HTTP. The only place that writes a status for one."""

from collections.abc import Mapping
from typing import TypeVar

from adapter import errors

T = TypeVar("T")

# (status, the `code` in the body); interface: docs/errors.md
HTTP: Mapping[type[BaseException], tuple[int, str]] = {
    errors.InvalidRequest: (400, "InvalidRequest"),
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
    errors.BackendError: (503, "BackendUnavailable"),
    errors.BackendTimeout: (504, "BackendTimeout"),
    errors.InsufficientMemory: (507, "InsufficientMemory"),
    errors.OutOfMemory: (507, "OutOfMemory"),
}


def lookup(table: Mapping[type[BaseException], T], error: BaseException) -> T | None:
    """The entry of the nearest class along the error's ancestry; None for a bug."""
    return next((table[kind] for kind in type(error).__mro__ if kind in table), None)

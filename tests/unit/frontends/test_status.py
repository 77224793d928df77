"""One table from errors to HTTP; every error a caller can meet has its entry."""

import json

import pytest

from adapter import errors
from adapter.core.model import ModelId
from adapter.errors import AdapterError
from adapter.frontends.http.instrumentation import own_refusal
from adapter.frontends.status import HTTP, lookup
from tests.cases import rows

# the branches of the tree: classes that sort errors and are never raised themselves
GROUPS = {
    AdapterError,
    errors.AboutMemory,
    errors.CallerError,
    errors.CapacityError,
    errors.ModelFailed,
}

# the answers that users and the platform rely on, by class name
EXPECTED = {
    "InvalidRequest": (400, "InvalidRequest"),
    "IncompleteMessage": (400, "InvalidRequest"),
    "BrokenBody": (400, "InvalidRequest"),
    "SlowBody": (408, "SlowBody"),
    "MethodNotAllowed": (405, "MethodNotAllowed"),
    "UnknownEncoding": (400, "InvalidRequest"),
    "UnsupportedMediaType": (415, "UnsupportedMediaType"),
    "NotAcceptable": (406, "NotAcceptable"),
    "NotJson": (400, "InvalidRequest"),
    "AlreadyRegistered": (400, "AlreadyRegistered"),
    "NotRegistered": (404, "NotRegistered"),
    "Forbidden": (403, "Forbidden"),
    "Unauthenticated": (401, "Unauthenticated"),
    "InferenceOnly": (403, "InferenceOnly"),
    "InlineFilesOff": (403, "InlineFilesOff"),
    "NotPassedThrough": (403, "NotPassedThrough"),
    "TooManyConnections": (503, "TooManyConnections"),
    "NotStarted": (503, "NotStarted"),
    "NotTaken": (503, "NotTaken"),
    "PayloadTooLarge": (413, "PayloadTooLarge"),
    "MessageTooLarge": (413, "PayloadTooLarge"),
    "InvalidModel": (400, "InvalidModel"),
    "SourceMissing": (404, "SourceMissing"),
    "ModelNotFound": (404, "ModelNotFound"),
    "AlreadyLoaded": (409, "AlreadyLoaded"),
    "UnloadedMeanwhile": (409, "UnloadedMeanwhile"),
    "ModelNotReady": (503, "ModelNotReady"),
    "ModelTooLarge": (400, "ModelTooLarge"),  # 507 would make the platform evict for nothing
    "InsufficientMemory": (507, "InsufficientMemory"),
    "OutOfMemory": (507, "OutOfMemory"),
    "BackendError": (503, "BackendUnavailable"),  # the disk under Triton refused
    "BackendUnavailable": (503, "BackendUnavailable"),
    "Overloaded": (503, "BackendUnavailable"),  # Triton's own queue is full
    "BackendTimeout": (504, "BackendTimeout"),
    "LoadFailed": (400, "InvalidModel"),
    "GivenUp": (503, "GivenUp"),
    "InferenceFailed": (500, "InferenceFailed"),
    "StubDied": (500, "InferenceFailed"),
    "InvalidCall": (400, "InvalidRequest"),
    "UnknownOperation": (400, "InvalidRequest"),
    "InvalidSignature": (403, "Forbidden"),
    "InvalidArtifact": (400, "InvalidModel"),
    "ArtifactNotFound": (404, "ArtifactNotFound"),
    "StoreDenied": (502, "StoreDenied"),
    "StoreUnavailable": (503, "StoreUnavailable"),
    "NoRoom": (503, "NoRoom"),
    "TooManyWaiting": (503, "TooManyWaiting"),
    "TooManyStreams": (503, "TooManyWaiting"),
}


def tree(kind: type[AdapterError]) -> set[type[AdapterError]]:
    """Of the errors that have a place in the tables; what a module raises for itself has none."""
    children = [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    return {kind}.union(*map(tree, children))


def an(kind: type[AdapterError]) -> AdapterError:
    if kind is errors.UnsupportedMediaType:
        return kind("text", accepted="gzip")
    if kind is errors.Unauthenticated:
        return kind("text", is_wrong=False)
    if kind is errors.MethodNotAllowed:
        return kind("text", allowed="GET")
    if issubclass(kind, errors.BackendUnavailable):
        return kind("text", model_id="m", delivered=True)
    return kind("text", model_id="m")


def test_every_error_of_tree_has_expected_answer():
    assert {kind.__name__ for kind in tree(AdapterError) - GROUPS} == set(EXPECTED)


@rows("kind", sorted(tree(AdapterError) - GROUPS, key=lambda kind: kind.__name__))
def test_an_error_is_answered_as_the_interface_says(kind):
    assert lookup(HTTP, an(kind)) == EXPECTED[kind.__name__]


def test_unlisted_error_is_answered_as_its_ancestor():
    class Odd(errors.OutOfMemory):
        pass

    assert lookup(HTTP, Odd("text")) == (507, "OutOfMemory")
    assert lookup({errors.CapacityError: 1, AdapterError: 2}, Odd("text")) == 1


@pytest.mark.parametrize("error", [ValueError("x"), AdapterError("x"), errors.InvalidSettings([])])
def test_what_has_no_entry_is_a_bug(error):
    assert lookup(HTTP, error) is None


def test_nameless_error_is_told_with_asked_model():
    answer = own_refusal(errors.InvalidRequest("no JSON"), ModelId("m"))
    assert json.loads(answer.body)["model_name"] == "m"


def test_error_without_entry_is_answered_as_internal():
    answer = own_refusal(AdapterError("x"), None)
    assert (answer.status, json.loads(answer.body)["code"]) == (500, "InternalError")

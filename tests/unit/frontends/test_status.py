"""One table from errors to HTTP: every error that a caller can meet has an answer in it."""

import json

import pytest

from adapter import errors
from adapter.core.model import ModelId
from adapter.errors import AdapterError
from adapter.frontends.http.instrumentation import own_refusal
from adapter.frontends.status import HTTP, lookup

# the branches of the tree: classes that sort errors and are never raised themselves
GROUPS = {
    AdapterError,
    errors.AboutMemory,
    errors.CallerError,
    errors.CapacityError,
    errors.ModelFailed,
}

# Statuses that platforms act upon.
RELIED_ON = {
    errors.ModelNotFound: 404,  # the model is loaded again
    errors.AlreadyLoaded: 409,  # the load is taken for done
    errors.InsufficientMemory: 507,  # another model is evicted, and the load repeated
    errors.OutOfMemory: 507,
    errors.ModelTooLarge: 400,  # 507 would make them evict for nothing
    errors.LoadFailed: 400,
    errors.ModelNotReady: 503,
    errors.Overloaded: 503,
    errors.BackendTimeout: 504,
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


def test_every_error_of_the_tree_has_an_answer():
    unknown = [kind for kind in tree(AdapterError) - GROUPS if lookup(HTTP, an(kind)) is None]
    assert unknown == []


def test_status_is_the_one_that_platforms_act_upon():
    statuses = {kind: lookup(HTTP, an(kind))[0] for kind in RELIED_ON}
    assert statuses == RELIED_ON


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

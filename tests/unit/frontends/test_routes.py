"""The table of calls: which path is which, and what each may do."""

import pytest

from adapter.frontends.routes import INFERENCES, ROUTES, RPCS, Scope, find
from tests.cases import rows


def path_of(*segments: str) -> str | None:
    found = find(segments)
    return None if found is None else found.path


@rows(
    ("segments", "path"),
    [
        (["models", "a/b", "invoke"], "/models/{model_name}/invoke"),
        (["v2", "models", "stats"], "/v2/models/stats"),
        (["v2", "models", "stats", "infer"], "/v2/models/{model_name}/infer"),
        (["v2", "models", "stats", "stats"], "/v2/models/{model_name}/stats"),
        (["v2", "models", "m", "versions", "1"], "/v2/models/{model_name}/versions/{version}"),
        (["v2", "models", "m", "versions", "one"], None),
        (["v2", "models", "m", "versions", "1", "trace", "setting"], None),
        (["v2", "models"], None),
        (["models", "m", "infer"], None),
        ([""], "/"),
        (["", ""], None),
    ],
)
def test_what_clients_choose_is_no_part_of_a_path(segments, path):
    assert path_of(*segments) == path


def test_a_path_is_passed_on_with_what_its_caller_chose():
    region = find(["v2", "systemsharedmemory", "region", "a/{b}", "status"])
    version = find(["v2", "models", "{m}", "versions", "2", "infer"])

    assert region.below_v2() == "/systemsharedmemory/region/a%2F%7Bb%7D/status"
    assert version.below_model() == "/versions/2/infer"


def test_each_path_has_a_method_once():
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)


@pytest.mark.parametrize(
    ("scope", "operations"),
    [
        (Scope.SERVER, "about openapi ping server_metadata live server_ready"),
        (Scope.METADATA, "all_statistics metadata config statistics ready"),
        (Scope.READ, "list get repository_index shared_memory trace logging"),
        (Scope.CONTROL, "load unload repository_load repository_unload"),
    ],
)
def test_what_a_call_may_do_is_what_its_operation_says(scope, operations):
    assert {route.operation for route in ROUTES if route.scope is scope} == {*operations.split()}


def test_a_call_over_grpc_that_changes_models_has_no_row():
    assert "RepositoryModelLoad" not in RPCS
    assert Scope.CONTROL not in RPCS.values()


def test_all_that_reaches_beyond_models_is_opened_by_passthrough():
    opened = {route.operation for route in ROUTES if route.passthrough is not None}

    assert opened == {"shared_memory", "trace", "logging"}
    assert INFERENCES.isdisjoint(opened)

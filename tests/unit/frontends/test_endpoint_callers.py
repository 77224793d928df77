"""What a key of the endpoint may ask for, and what is open to who has none."""

import pytest

from adapter.errors import Forbidden, Unauthenticated
from adapter.frontends.access import Access
from adapter.frontends.http.endpoint.callers import Caller

RIGHT = ["Bearer a-token-of-the-adapter"]


@pytest.mark.parametrize(
    ("pattern", "path", "may"),
    [
        ("team-a/*", "team-a/digits.tar.gz", True),
        ("team-a/*", "team-a/deep/er.zip", True),
        ("team-a/*", "team-a", False),
        ("team-a/*", "team-aa/digits", False),
        ("team-a/*", "x/team-a/digits", False),
        ("m?.zip", "m1.zip", True),
        ("m?.zip", "m10.zip", False),
        ("m?.zip", "m1xzip", False),
        ("m?.zip", "m1.zip.old", False),
        ("[a-z]", "b", False),
        ("[a-z]", "[a-z]", True),
        ("*", "any\nthing", True),
    ],
)
def test_a_pattern_is_of_the_whole_key(pattern: str, path: str, may: bool) -> None:
    assert Caller(["other", pattern]).may_ask_for(path) is may


@pytest.mark.parametrize(
    "operation",
    [
        *("invoke", "infer", "generate_stream", "load", "shared_memory", "trace", "ModelInfer"),
        *("list", "get", "repository_index", "metadata", "config", "statistics", "ready"),
        *("RepositoryIndex", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"),
    ],
)
def test_where_the_endpoint_has_keys_only_the_token_goes_round_it(operation: str) -> None:
    for access, given in (
        (Access("http", is_keyed=True), []),
        (Access("http", is_keyed=True), RIGHT),
        (Access("http", is_keyed=True, token="another-token-of-it"), ["Basic a"]),  # noqa: S106
    ):
        with pytest.raises((Forbidden, Unauthenticated)):
            access.check(operation, given)
    Access("http", is_keyed=True, token=RIGHT[0].split()[1]).check(operation, RIGHT)


@pytest.mark.parametrize("operation", ["ping", "live", "server_metadata", "ServerReady"])
def test_what_says_nothing_of_any_model_stays_open(operation: str) -> None:
    Access("http", is_keyed=True).check(operation, [])

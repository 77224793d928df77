"""What a key of the endpoint may ask for, and what is open to who has none."""

from fnmatch import fnmatchcase

import hypothesis
import pytest
from hypothesis import strategies as st

from adapter.errors import Forbidden, Unauthenticated
from adapter.frontends.access import Access
from adapter.frontends.endpoint.signatures import Caller
from adapter.frontends.routes import Scope
from tests.cases import rows

RIGHT = ["Bearer a-token-of-the-adapter"]


@rows(
    ("pattern", "path", "may"),
    [
        ("team-a/*", "team-a/deep/er.zip", True),
        ("team-a/*", "team-a", False),
        ("team-a/*", "x/team-a/digits", False),
        ("m?.zip", "m1.zip", True),
        ("m?.zip", "m1.zip.old", False),
        ("[a-z]", "b", False),
        ("[a-z]", "[a-z]", True),
        ("*", "any\nthing", True),
    ],
)
def test_a_pattern_is_of_the_whole_key(pattern: str, path: str, may: bool) -> None:
    assert Caller(["other", pattern]).is_allowed(path) is may


@hypothesis.given(st.text("ab*?", max_size=8), st.text("ab", max_size=10))
def test_pattern_means_what_it_means_to_shell(pattern: str, path: str) -> None:
    assert Caller([pattern]).is_allowed(path) is fnmatchcase(path, pattern)


@pytest.mark.timeout(20)
def test_pattern_with_many_stars_is_fast() -> None:
    """It is done on the event loop; eight stars held that for more than ten minutes."""
    caller = Caller(["-".join(["team/*"] + ["*"] * 7) + ".zip"])
    assert not caller.is_allowed("team/" + "-" * 1000)
    assert caller.is_allowed("team/" + "-" * 1000 + ".zip")


@pytest.mark.parametrize("scope", set(Scope) - {Scope.SERVER})
def test_only_the_token_passes_endpoint_keys(scope: Scope) -> None:
    for access, given in (
        (Access("http", is_keyed=True), []),
        (Access("http", is_keyed=True), RIGHT),
        (Access("http", is_keyed=True, token="another-token-of-it"), ["Basic a"]),  # noqa: S106
    ):
        with pytest.raises((Forbidden, Unauthenticated)):
            access.check(scope, given)
    Access("http", is_keyed=True, token=RIGHT[0].split()[1]).check(scope, RIGHT)


def test_what_says_nothing_of_any_model_stays_open() -> None:
    Access("http", is_keyed=True).check(Scope.SERVER, [])

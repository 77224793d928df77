import pytest

from adapter.core.artifacts import ArtifactKey, FetchProgress, parse_artifact_path
from adapter.errors import InvalidRequest
from tests.cases import rows


@pytest.mark.parametrize("text", ["digits.tar.gz", "team-a/digits.tar.gz", "a b/ä", "x" * 1024])
def test_key_within_store_is_taken_as_it_is(text):
    assert parse_artifact_path(text) == text


@rows(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("/", "begins with a slash"),
        ("team-a/digits.tar.gz/", "ends with a slash"),
        ("/etc/passwd", "begins with a slash"),
        ("../secrets", "'..'"),
        ("a/../../b", "'..'"),
        ("a//b", "a part that is empty"),
        ("a/./b", "'.'"),
        ("a\x00b", "NUL"),
        ("a\ud800", "UTF-8"),
        ("ä" * 513, "1026 bytes long; at most 1024"),
    ],
)
def test_invalid_key_is_refused_with_the_reason(text, reason):
    with pytest.raises(InvalidRequest, match=reason):
        parse_artifact_path(text)


def test_key_of_named_endpoint_shows_its_name():
    assert str(ArtifactKey("", "a.zip")) == "a.zip"
    assert str(ArtifactKey("blue", "a.zip")) == "blue/a.zip"


def test_progress_is_unknown_until_store_has_said_size():
    assert FetchProgress(7).percent is None
    assert FetchProgress(41, 100).percent == 41
    assert FetchProgress(120, 100).percent == 100

"""Keys of the endpoint's callers, as the settings have them."""

from pathlib import Path

import pytest

from adapter.errors import InvalidSettings
from adapter.settings import load_settings, parse_endpoint_key

ENVIRON = {"SECRET": "s3cret"}


def test_a_key_has_its_secret_and_its_patterns(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from a file\n")
    key = parse_endpoint_key("AKID env:SECRET team-a/* b", ENVIRON)
    assert (key.access_key, key.secret, key.models) == ("AKID", "s3cret", ("team-a/*", "b"))
    secret = parse_endpoint_key(f"AKID file:{file} *", {}).secret
    assert secret == file.read_text().strip()
    assert "s3cret" not in repr(key)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("AKID env:SECRET", "write ACCESS_KEY, env:VARIABLE or file:PATH"),
        ("AKID s3cret *", "write ACCESS_KEY, env:VARIABLE or file:PATH"),
        ("AKID env:NONE *", "env:NONE: there is no secret"),
        ("AKID file:/none *", "No such file"),
        ("A/B env:SECRET *", "is not an access key"),
    ],
)
def test_what_is_wrong_with_a_key_is_said_with_the_name_of_the_setting(
    line: str, said: str
) -> None:
    with pytest.raises(InvalidSettings, match="endpoint-keys") as raised:
        load_settings({"endpoint_keys": [line]}, ENVIRON, None)
    assert said in str(raised.value)


def test_an_access_key_is_there_once() -> None:
    environ = ENVIRON | {"ADAPTER_ENDPOINT_KEYS": "A env:SECRET a\nA env:SECRET b"}
    with pytest.raises(InvalidSettings, match="an access key occurs twice"):
        load_settings({}, environ, None)

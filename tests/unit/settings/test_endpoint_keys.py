"""Keys of the endpoint's callers, as the settings have them."""

import json
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
        ("AKID env:NONE *", "key 1: there is no secret in the variable behind `env:`"),
        ("AKID file:/none *", "No such file"),
        ("A/B env:SECRET *", "is not an access key"),
    ],
)
def test_wrong_key_is_told_with_its_setting(line: str, said: str) -> None:
    with pytest.raises(InvalidSettings, match="endpoint-keys") as raised:
        load_settings({"endpoint_keys": [line]}, ENVIRON, None)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "line",
    [
        "AKID s3cret *",
        "AKID:s3cret env:SECRET *",
        "AKID env:s3cret *",
        "AKID file:/s3cret *",
        "s3cret",
    ],
)
def test_refused_key_is_not_quoted_from_any_source(line: str, tmp_path: Path) -> None:
    """Its secret may be in the wrong place."""
    file = tmp_path / "adapter.yaml"
    file.write_text(json.dumps({"endpoint_keys": [line]}))
    for flags, environ, path in (
        ({"endpoint_keys": [line]}, {}, None),
        ({}, {"ADAPTER_ENDPOINT_KEYS": line}, None),
        ({}, {}, file),
    ):
        for store in ({}, {"ADAPTER_MODEL_STORE": "/store"}):
            with pytest.raises(InvalidSettings) as raised:
                load_settings(flags, environ | store, path)
            assert "s3cret" not in str(raised.value)


def test_value_of_an_unknown_setting_is_not_quoted(tmp_path: Path) -> None:
    """The value behind a misspelt name may be a secret."""
    file = tmp_path / "adapter.yaml"
    file.write_text("control_tokn: s3cret\n")
    with pytest.raises(InvalidSettings) as raised:
        load_settings({}, {"ADAPTER_CONTROL_TOKN": "s3cret"}, file)
    problems = raised.value.problems
    assert problems == [
        f"file {file}, key control_tokn: no such setting; did you mean control_token?",
        "environment ADAPTER_CONTROL_TOKN: no such setting; did you mean ADAPTER_CONTROL_TOKEN?",
    ]


def test_an_access_key_is_there_once() -> None:
    environ = ENVIRON | {"ADAPTER_ENDPOINT_KEYS": "A env:SECRET a\nA env:SECRET b"}
    with pytest.raises(InvalidSettings, match="an access key occurs twice"):
        load_settings({}, environ, None)


@pytest.mark.parametrize(
    "written",
    [
        {"a": {"modles": "https://u:s3cret@h/x"}},
        {"a": {"models": "https://h/x", "key": "s3cret"}},
        ["https://u:s3cret@h/x?a=b"],
        ["https://u:s3cret@h/x"],
    ],
)
def test_refused_endpoint_is_not_quoted(written: object, tmp_path: Path) -> None:
    """Its URL may hold credentials."""
    file = tmp_path / "adapter.yaml"
    file.write_text(json.dumps({"endpoints": written}))
    with pytest.raises(InvalidSettings) as raised:
        load_settings({}, {}, file)
    assert "s3cret" not in str(raised.value)

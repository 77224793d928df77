"""Settings of stores that are wrong together: all of them at once, each with its origin."""

import os

import pytest

from adapter.errors import InvalidSettings
from adapter.settings.sources import load_settings

AT_S3 = {"model_store": "s3://models"}


def problems(flags: dict[str, object], environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(InvalidSettings) as refused:
        load_settings(flags, environ or {}, None)
    return refused.value.problems


def test_store_settings_without_store_are_refused_together():
    flags = {"pin": ("a",), "preload": ("b",), "revalidate_seconds": 5, "idle_unload_seconds": 1}
    environ = {"ADAPTER_ON_DEMAND": "true", "ADAPTER_ENDPOINT_KEYS": "A env:S *", "S": "secret"}
    said = problems(flags, environ)
    assert len(said) == 6
    assert all(each.endswith("it needs model_store or endpoints") for each in said)
    assert "flag --pin: ('a',): it needs model_store or endpoints" in said
    assert "environment ADAPTER_ON_DEMAND: 'true': it needs model_store or endpoints" in said


def test_they_are_told_beside_other_problems():
    said = problems({"pin": ("a",), "http": "nowhere"})
    assert [each.split(":")[0] for each in said] == ["flag --pin", "flag --http"]


@pytest.mark.parametrize("store", ["model_store", "endpoints"])
def test_with_a_store_they_are_taken(store, tmp_path):
    where = f"team={tmp_path}" if store == "endpoints" else str(tmp_path)
    loaded = load_settings({store: where, "pin": ("a",), "on_demand": True}, {}, None)
    assert loaded.warnings == []


def test_what_is_switched_off_needs_no_store():
    environ = {"ADAPTER_ON_DEMAND": "false", "ADAPTER_IDLE_UNLOAD_SECONDS": "0"}
    assert load_settings({}, environ, None).warnings == []


def test_useless_setting_without_store_is_warned_of(tmp_path):
    loaded = load_settings({"cache_dir": str(tmp_path)}, {}, None)
    assert loaded.warnings == ["cache_dir: has no effect without model_store or endpoints"]


def test_absent_store_folder_is_only_warned_of(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for name, why in (("none", "does not exist"), ("file", "is not a folder")):
        loaded = load_settings({"model_store": f"{tmp_path}/{name}"}, {}, None)
        assert [why in each for each in loaded.warnings] == [True]


def test_folder_that_cannot_be_read_is_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root reads every folder
    loaded = load_settings({"model_store": str(tmp_path)}, {}, None)
    assert ["cannot be read" in each for each in loaded.warnings] == [True]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3:/models", "two slashes"),
        ("s3:models", "two slashes"),
        ("s3://", "there is no bucket"),
        ("s3:///models", "there is no bucket"),
        ("az://", "there is no container"),
        ("ftp://models", "write s3://BUCKET"),
        ("file:models", "write file:///PATH"),
    ],
)
def test_url_of_no_store_is_refused(url, why):
    (said,) = problems({"model_store": url})
    assert said.startswith(f"flag --model-store: {url!r}: ")
    assert why in said


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"])
def test_endpoint_of_s3_without_scheme_is_refused(name):
    (said,) = problems(AT_S3, {name: "localhost:9000"})
    assert said.startswith(f"environment {name}: 'localhost:9000': write http://HOST:PORT")
    assert load_settings(AT_S3, {name: "http://localhost:9000"}, None)
    assert load_settings({}, {name: "localhost:9000"}, None), "no store asks for it"

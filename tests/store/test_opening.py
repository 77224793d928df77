"""What a store needs, and what is said where it is not there."""

import importlib.util
from datetime import timedelta

import pytest

from adapter.errors import InvalidSettings
from adapter.settings.locations import parse_location
from adapter.store import opening
from adapter.store.opening import FolderStore, open_store


@pytest.fixture
def without_obstore(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(opening, "find_spec", lambda n: None if n == "obstore" else find_spec(n))


def test_without_obstore_it_is_said_what_to_install(without_obstore):
    with pytest.raises(InvalidSettings) as refused:
        open_store("model_store", parse_location("s3://models"), 1)
    assert refused.value.problems == [
        "model_store: s3://models needs the extra store: in a clone pip install '.[store]'"
    ]


def test_a_folder_needs_no_obstore(without_obstore, tmp_path):
    assert isinstance(open_store("model_store", parse_location(str(tmp_path)), 1), FolderStore)


def test_a_setting_that_obstore_refuses_is_named_without_its_value(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "no base64: secret")
    with pytest.raises(InvalidSettings, match="az://box cannot be used") as refused:
        open_store("endpoints, team", parse_location("az://box"), 1)
    assert "secret" not in str(refused.value)


def test_silence_is_limited_and_a_long_download_is_not(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3.example.com")
    store = open_store("model_store", parse_location("s3://models"), 7)
    client = store._objects.client_options
    assert client["read_timeout"] == "7s"
    assert "day" in client["timeout"]
    assert store._objects.retry_config["retry_timeout"] == timedelta(seconds=7)


@pytest.mark.parametrize(
    ("endpoint", "is_allowed"), [("https://s3.example.com", False), ("http://minio:9000", True)]
)
def test_a_connection_without_tls_is_for_an_endpoint_that_is_named_so(
    monkeypatch, endpoint, is_allowed
):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    store = open_store("model_store", parse_location("s3://models"), 7)
    assert store._objects.client_options["allow_http"] == str(is_allowed).lower()

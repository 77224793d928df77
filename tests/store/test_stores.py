"""What a store needs, and what is said where it is not there."""

import importlib.util

import pytest

from adapter.errors import InvalidSettings
from adapter.settings.locations import parse_location
from adapter.store import stores
from adapter.store.folder import FolderStore
from adapter.store.stores import open_store


@pytest.fixture
def without_obstore(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(stores, "find_spec", lambda n: None if n == "obstore" else find_spec(n))


def test_without_obstore_it_is_said_what_to_install(without_obstore):
    with pytest.raises(InvalidSettings) as refused:
        open_store("model_store", parse_location("s3://models"), 1)
    assert refused.value.problems == [
        "model_store: s3://models needs the extra store: in a clone pip install '.[store]'"
    ]


def test_a_folder_needs_no_obstore(without_obstore, tmp_path):
    assert isinstance(open_store("model_store", parse_location(str(tmp_path)), 1), FolderStore)


def test_setting_refused_by_obstore_is_named_without_value(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "no base64: secret")
    with pytest.raises(InvalidSettings, match="az://box cannot be used") as refused:
        open_store("endpoints, team", parse_location("az://box"), 1)
    assert "secret" not in str(refused.value)

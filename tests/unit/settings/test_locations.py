"""Where a store is, as users write it."""

import pytest

from adapter.settings.locations import StoreKind, StoreLocation, parse_location
from tests.cases import rows


@rows(
    ("text", "location", "shown"),
    [
        ("s3://models", StoreLocation(StoreKind.S3, "models"), "s3://models"),
        ("s3://models/", StoreLocation(StoreKind.S3, "models"), "s3://models"),
        ("s3://models/a/b/", StoreLocation(StoreKind.S3, "models", "a/b"), "s3://models/a/b"),
        ("gs://b.example.com/x", StoreLocation(StoreKind.GCS, "b.example.com", "x"), None),
        ("az://box", StoreLocation(StoreKind.AZURE, "box"), "az://box"),
        ("https://host:8/m/", StoreLocation(StoreKind.HTTP, "https://host:8/m"), None),
        ("http://host", StoreLocation(StoreKind.HTTP, "http://host"), "http://host"),
        ("/srv/models", StoreLocation(StoreKind.FOLDER, "/srv/models"), "/srv/models"),
        ("models", StoreLocation(StoreKind.FOLDER, "models"), "models"),
        ("file:///srv/a%20b", StoreLocation(StoreKind.FOLDER, "/srv/a b"), "/srv/a b"),
    ],
)
def test_store_is_bucket_url_or_folder(text, location, shown):
    assert parse_location(text) == location
    assert str(location) == (shown or text.rstrip("/"))


@rows(
    "text",
    ["", "s3://", "s3:///key", "ftp://host/x", "S4://x", "https://", "file://host/x", "a\0b"],
)
def test_invalid_store_place_is_refused_with_forms(text):
    with pytest.raises(ValueError, match="write"):
        parse_location(text)


@pytest.mark.parametrize(
    "text", ["https://me:secret@host/x", "https://host/x?sig=secret", "s3://key:secret@bucket"]
)
def test_urls_credentials_are_refused_unrepeated(text):
    with pytest.raises(ValueError, match="credentials are found") as refused:
        parse_location(text)
    assert "secret" not in str(refused.value)


def test_key_is_named_with_its_bucket_and_prefix():
    location = parse_location("s3://models/team")
    assert location.place("a.tar.gz") == "bucket: models, key: team/a.tar.gz"
    assert parse_location("/srv").place("a") == "key: a"

"""Where the url of a load may lead."""

import pytest

from adapter.errors import InvalidRequest, SourceMissing
from adapter.packages.roots import resolve
from tests.cases import rows


@pytest.fixture
def root(tmp_path):
    """The only model root."""
    folder = tmp_path / "models"
    (folder / "m").mkdir(parents=True)
    (folder / "m" / "file").touch()
    return folder


def look(url, root):
    return resolve(str(url), [str(root)])


def test_path_within_root_may_be_the_root(root):
    for url in (root, root / "m", root / "m" / "file"):
        assert look(url, root) == url
    assert look(f"{root}/m/../m/./file/", root.parent) == root / "m" / "file"


def test_any_of_the_roots_will_do(root, tmp_path):
    (tmp_path / "more").mkdir()
    roots = [str(root), str(tmp_path / "more")]
    assert resolve(str(tmp_path / "more"), roots) == tmp_path / "more"
    assert resolve(str(root / "m"), ["/"]) == root / "m"


def test_links_are_followed(root):
    (root / "link").symlink_to("m")
    assert look(root / "link" / "file", root) == root / "m" / "file"


def test_file_url_is_decoded_and_path_not(root):
    (root / "a b%20").mkdir()
    (root / "a%20b").mkdir()
    assert look(f"file://{root}/a%20b%2520", root) == root / "a b%20"
    assert look(root / "a%20b", root) == root / "a%20b"


def test_file_url_can_name_any_bytes(root):
    odd = root / "\udcff"
    odd.mkdir()
    assert look(f"file://{root}/%FF", root) == odd


@rows(
    "url",
    ["", "m", "./m", "s3://bucket/m", "file:m", "file://host/m", "/m\0", "file:///m%00", "/\ud800"],
)
def test_other_urls_are_invalid_requests(url):
    with pytest.raises(InvalidRequest, match="url"):
        resolve(url, ["/"])


def test_url_outside_roots_is_refused_unseen(root, tmp_path):
    """Whether it exists or not."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "models2").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    for url in (
        tmp_path / "outside",
        tmp_path / "absent",
        tmp_path / "models2",
        root / "link",
        root / "link" / "absent",
        f"{root}/../outside",
        f"file://{root}/%2E%2E/outside",
    ):
        with pytest.raises(InvalidRequest, match="outside the model roots") as caught:
            look(url, root)
        assert str(caught.value).endswith(
            " is outside the model roots, which --model-roots (ADAPTER_MODEL_ROOTS) names"
        )


def test_message_can_be_sent_whatever_url_holds(root):
    with pytest.raises(SourceMissing) as caught:
        look(f"file://{root}/%FF", root)
    assert r"\xff" in str(caught.value)
    assert str(caught.value).encode()

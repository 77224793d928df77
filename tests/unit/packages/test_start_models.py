"""What `load_at_start` means."""

from pathlib import Path

import pytest

from adapter.errors import InvalidRequest, SourceMissing
from adapter.packages.roots import start_models


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        ([], {}),
        (["a"], {"a": "/r/a"}),
        (["/else/where/b.tar.gz"], {"b.tar.gz": "/else/where/b.tar.gz"}),
        (["x y=teams/a"], {"x y": "/r/teams/a"}),
        (["n=/e/a", "teams/a=b"], {"n": "/e/a", "a=b": "/r/teams/a=b"}),
    ],
)
def test_preload_entry_is_path_below_first_root(entries, wanted):
    found = start_models(entries, Path("/r"))

    assert {name: source.url for name, source in found.items()} == wanted


def test_a_star_is_each_package_in_a_folder(tmp_path):
    for name in ("b", "a", ".hidden", "_triton_models", "lost+found"):
        (tmp_path / "models" / name).mkdir(parents=True)

    assert list(start_models(["models/*"], tmp_path)) == ["a", "b"]
    assert list(start_models([f"{tmp_path}/models/*"], Path("/r"))) == ["a", "b"]


def test_unlistable_folder_or_repeated_name_is_refused(tmp_path):
    with pytest.raises(SourceMissing, match="load_at_start"):
        start_models(["none/*"], tmp_path)
    with pytest.raises(InvalidRequest, match="'a' twice"):
        start_models(["x/a", "y/a"], tmp_path)

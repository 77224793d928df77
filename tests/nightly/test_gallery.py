"""The example of the gallery that gets its packages from an index, with scikit-learn itself."""

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.docs.place import objects, place

pytestmark = [pytest.mark.triton, pytest.mark.timeout(600)]

PAGE = ROOT / "examples" / "gallery" / "README.md"


def test_scikit_learn_in_an_archive_names_iris(tmp_path: Path) -> None:
    [serve] = [block for block in blocks(PAGE) if block.mode == "server"]
    [build] = [block for block in blocks(PAGE) if block.reason.endswith(Path(__file__).name)]
    with place(tmp_path / "clone") as here:
        here.serve(serve)
        [answer] = objects(here.run(build))

    assert isinstance(answer, dict)
    assert answer["outputs"][0]["data"] == ["setosa"]

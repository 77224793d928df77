"""What the README says can be pasted, from the first line to the last."""

from pathlib import Path

import pytest

from tests.docs.pages import README
from tests.docs.place import place


@pytest.mark.triton
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_blocks_of_the_readme_can_be_pasted(tmp_path: Path) -> None:
    with place(tmp_path / "clone") as here:
        here.paste(README)

"""`make test TRITON=...` runs on another tritonserver, and says which."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.another_triton import EMBEDDED, SERVER, is_of
from tests.docs.pages import ROOT
from tests.journeys.modelmesh.tritons import write_tritonserver

# Of each kind: the client to Triton, Triton as a process, and the adapter held against it.
SUBSET = (
    "tests/contract/test_triton.py::test_loaded_model_is_ready_until_unloaded",
    "tests/contract/test_embedded.py::test_a_started_server_answers_at_the_chosen_addresses",
    "tests/journeys/v2/test_parity.py::test_an_entry_of_the_index",
)


@pytest.mark.triton
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_tests_run_on_the_named_tritonserver(tmp_path):
    program = write_tritonserver(tmp_path)
    started = tmp_path / "started"
    text = program.read_text()
    program.write_text(text.replace("\n", f"\necho x >> {shlex.quote(str(started))}\n", 1))

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *SUBSET],
        cwd=ROOT,
        env={**os.environ, SERVER: str(program)},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )

    assert done.returncode == 0, done.stdout
    assert f"tritonserver: {program}, version {EMBEDDED}\n" in done.stdout
    assert re.search(r"\b\d+ passed", done.stdout)
    # to be asked for its version, and once for each kind of test at least
    assert len(started.read_text().split()) >= 4


@pytest.mark.parametrize(
    ("found", "is_one"),
    [("2.51.0", True), ("2.73.0dev", True), ("2.75.0", False), ("2.5.0", False)],
)
def test_patch_version_belongs_to_its_release(found, is_one):
    assert is_of(("2.51", "2.73"), found) == is_one

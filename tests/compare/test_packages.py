"""Names, what a package holds, and urls."""

import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from tests.compare.servers import FAULTS, Endpoint, error_of, on_both
from tests.trees import write_python_model

pytestmark = [pytest.mark.triton, pytest.mark.builtin, pytest.mark.nightly]

# as model_name says: opaque
NAMES = ["team/a.tar.gz", "50%", "a+b:c?modèle"]


@on_both("compares the segment of the path as it came")
@pytest.mark.parametrize("name", NAMES)
def test_any_name_can_be_got_invoked_and_unloaded(endpoint: Endpoint, name: str) -> None:
    endpoint.put(name, endpoint.model())

    assert endpoint.get(name).status == 200
    assert endpoint.get(name).json()["modelName"] == name
    answer = endpoint.invoke(name)
    assert (answer.status, answer.json()["model_name"]) == (200, name)
    assert endpoint.delete(name).status == 200
    assert endpoint.get(name).status == 404


@on_both("a shell reads it, and the load fails or hangs")
@pytest.mark.parametrize("name", ['say "x"', "#1"], ids=["quotes", "comment"])
def test_a_name_may_hold_what_a_shell_reads(endpoint: Endpoint, name: str) -> None:
    assert endpoint.load(name, endpoint.model(), seconds=6).status == 200
    assert endpoint.listed() == [name]
    assert endpoint.invoke(name).json()["model_name"] == name


@on_both("a shell runs it")
def test_no_shell_runs_what_a_model_name_says(endpoint: Endpoint, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with suppress(*FAULTS):  # that it hangs as well is not the point
        endpoint.load(f"$(touch {mark})", endpoint.model(), seconds=4)

    assert not mark.exists()


@on_both("a shell runs it")
def test_no_shell_runs_what_a_folder_name_says(endpoint: Endpoint) -> None:
    """A folder name has no slash, so the command would leave its mark where the server runs."""
    where = Path(f"/proc/{endpoint.processes()[0]}/cwd").resolve()
    mark = where / f"mark-{uuid.uuid4().hex}"
    folder = endpoint.folder()
    write_python_model(folder / f"$(touch {mark.name})")
    with suppress(*FAULTS):
        endpoint.load("x", folder, seconds=4)

    try:
        assert not mark.exists()
    finally:
        mark.unlink(missing_ok=True)


@on_both("serves what the file system lists last")
def test_a_stray_folder_beside_the_model_does_no_harm(endpoint: Endpoint) -> None:
    folder = endpoint.folder()
    write_python_model(folder / "net")
    # until the model is not the last one, in the file system's own order
    for number in range(1000):
        if [path.name for path in folder.iterdir()][-1] != "net":
            break
        (folder / f"stray{number}").mkdir()

    assert endpoint.load("x", folder).status == 200
    assert endpoint.invoke("x").status == 200


@on_both("serves one of them")
def test_a_package_with_two_models_is_refused_by_their_names(endpoint: Endpoint) -> None:
    folder = endpoint.folder()
    write_python_model(folder / "first")
    write_python_model(folder / "second")

    reply = endpoint.load("x", folder)

    assert reply.status == 400
    assert "first" in error_of(reply)
    assert "second" in error_of(reply)


@on_both("takes [0-9A-Za-z._]+ for the hash")
def test_a_folder_may_have_any_name(endpoint: Endpoint) -> None:
    url = endpoint.folder().parent / "a-b c" / "model"
    write_python_model(url)

    assert endpoint.load("x", url).status == 200
    assert endpoint.invoke("x").status == 200


@on_both("takes /opt/ml/models/<hash>/model alone")
def test_the_last_folder_may_have_any_name(endpoint: Endpoint) -> None:
    url = endpoint.folder().parent / "weights"
    write_python_model(url)

    assert endpoint.load("x", url).status == 200
    assert endpoint.invoke("x").status == 200


@on_both("cuts /model off")
def test_the_url_is_told_as_it_was_given(endpoint: Endpoint) -> None:
    url = endpoint.model()
    endpoint.put("x", url)

    assert endpoint.get("x").json() == {"modelName": "x", "modelUrl": str(url)}


@on_both("the reason is in Triton's log alone")
def test_a_broken_config_is_refused_with_the_reason(endpoint: Endpoint) -> None:
    reply = endpoint.load("x", endpoint.model(config="backend: python\ninput {"))

    assert reply.status == 400
    assert "config.pbtxt:" in error_of(reply)

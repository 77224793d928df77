"""Packages of every shape, truly loaded by a real Triton and asked."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tritonclient.grpc import InferenceServerClient

from tests.packages.models import (
    ask,
    books,
    load,
    names_in_triton,
    pack,
    put,
    stubs,
    take_down,
    write_adding,
    write_alone,
    write_calling,
    write_ensemble,
)
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter, unload_all
from tests.trees import CONFIG, infer_body, write_python_model

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def completing(model_root: Path) -> Iterator[RunningAdapter]:
    """Its Triton completes the configs of models, which the shared one does not."""
    with embedded_adapter(f"--model-roots={model_root}") as adapter:
        yield adapter


@pytest.fixture
def asking(completing: RunningAdapter) -> Iterator[Client]:
    with closing(completing.client()) as client:
        yield client
    unload_all(completing)
    check_nothing_is_left(completing)


def check_nothing_is_left(adapter: RunningAdapter) -> None:
    assert list(adapter.repository.iterdir()) == []
    assert names_in_triton(adapter) == set()
    assert stubs(adapter) == []
    assert books(adapter) == ([], 0, 0)


@pytest.fixture
def adapter(shared_adapter: RunningAdapter) -> Iterator[RunningAdapter]:
    """The shared adapter; nothing is left of what a test has loaded, once it is unloaded."""
    yield shared_adapter
    unload_all(shared_adapter)
    check_nothing_is_left(shared_adapter)


def test_triton_warns_of_no_adapter_folder(
    adapter: RunningAdapter, client: Client, package: Path
) -> None:
    write_adding(package / "source" / "net", 1)
    put(client, "m", pack(package / "source", package / "m.tar.gz"))
    assert [line for line in adapter.events("triton.log") if ".unpacked" in line["line"]] == []


# -- one model ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "places",
    [
        pytest.param({"model.py": 1}, id="at the top"),
        pytest.param({"net/7/model.py": 1}, id="in a version folder of a sub-folder"),
        pytest.param({"9/model.py": 9, "10/model.py": 1, "2/model.py": 2}, id="highest version"),
    ],
)
def test_a_python_model_needs_no_config(
    asking: Client, package: Path, places: dict[str, int]
) -> None:
    for place, add in places.items():
        write_alone(package / place, add)
    put(asking, "m", package)
    assert ask(asking, "m", 1, 2) == [2, 3]


def test_a_single_file_is_a_model(asking: Client, package: Path) -> None:
    put(asking, "m", write_alone(package / "main.txt", 1), model_type="python")
    assert ask(asking, "m", 1) == [2]


def test_config_is_used_from_anywhere(client: Client, package: Path) -> None:
    model = write_adding(package / "net", 5)
    config = model / "config.pbtxt"
    config.write_text(f'name: "another"\n{config.read_text()}')
    put(client, "team/a b", package)
    reply = client.get("/models/team%2Fa%20b")
    assert reply.json() == {"modelName": "team/a b", "modelUrl": str(package)}
    assert ask(client, "team%2Fa%20b", 1) == [6]


@pytest.mark.parametrize("named", ["labels.txt", "1/labels.txt"])
def test_labels_are_served_from_a_folder_of_links(
    adapter: RunningAdapter, client: Client, package: Path, named: str
) -> None:
    config = CONFIG.replace('name: "OUT"', f'name: "OUT" label_filename: "{named}"')
    write_python_model(package, config=config)
    (package / named).write_text("cat\ndog\n")
    put(client, "m", package)
    assert not (adapter.repository / "m" / named).resolve().is_relative_to(package)
    body = infer_body(0.5, 2.5)
    body["outputs"] = [{"name": "OUT", "parameters": {"classification": 1}}]
    answer = client.post("/models/m/invoke", body).json()
    assert answer["outputs"][0]["data"] == ["2.500000:1:dog"]


# -- archives -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_alone"),
    [("m.tar.gz", False), ("m.zip", True)],
    ids=["tar.gz as url", "zip alone in a folder"],
)
def test_an_archive_is_unpacked(client: Client, package: Path, name: str, is_alone: bool) -> None:
    archive = pack(write_adding(package / "source", 3), package / name)
    shutil.rmtree(package / "source")
    put(client, "m", package if is_alone else archive)
    archive.unlink()  # it has served its turn
    assert ask(client, "m", 1) == [4]


def test_archived_ensemble_in_own_folder_is_served(client: Client, package: Path) -> None:
    write_adding(package / "source" / "all" / "one", 1)
    write_ensemble(package / "source" / "all" / "whole", "one", version=None)
    put(client, "m", pack(package / "source", package / "m.tar.gz"))
    assert ask(client, "m", 1) == [2]


# -- ensembles ----------------------------------------------------------------------------------


def test_two_ensembles_with_equal_names_serve(
    adapter: RunningAdapter, client: Client, package: Path
) -> None:
    for name, add in (("a", 1), ("b", 10)):
        write_adding(package / name / "first", add)
        write_adding(package / name / "second", 2 * add)
        write_ensemble(package / name / "whole", "first", "second")
        put(client, name, package / name)
    assert len(names_in_triton(adapter)) == 6
    assert ask(client, "a", 0) == [3]
    assert ask(client, "b", 0) == [30]
    listed = client.get("/models").json()["models"]
    assert [model["modelName"] for model in listed] == ["a", "b"]

    before = len(stubs(adapter))
    take_down(client, "a")
    assert ask(client, "b", 1) == [31]
    assert before - len(stubs(adapter)) == 2
    assert len(list(adapter.repository.iterdir())) == 3


def test_an_ensemble_of_an_ensemble_goes_down_whole(client: Client, package: Path) -> None:
    write_adding(package / "one", 1)
    write_ensemble(package / "inner", "one")
    write_ensemble(package / "outer", "inner", "one")
    put(client, "m", package)
    assert ask(client, "m", 1) == [3]


def test_caller_names_the_entry_of_several_models(client: Client, package: Path) -> None:
    write_adding(package / "one", 1)
    write_adding(package / "two", 2)
    refused = load(client, "m", package)
    assert refused.status == 400
    assert "'one', 'two'" in refused.json()["error"]
    put(client, "m", package, entry="two")
    assert ask(client, "m", 1) == [3]


def test_failed_step_leaves_nothing_of_the_ensemble(
    adapter: RunningAdapter, client: Client, package: Path
) -> None:
    write_adding(package / "good", 1)
    bad = write_adding(package / "bad", 1)
    (bad / "1" / "model.py").write_text("import nowhere_to_be_found\n")
    write_ensemble(package / "whole", "good", "bad")
    reply = load(client, "m", package)
    assert reply.status == 400
    assert reply.json()["code"] == "InvalidModel"


# -- models that are called by name -------------------------------------------------------------


def test_helper_keeps_its_name_where_free(
    adapter: RunningAdapter, client: Client, package: Path
) -> None:
    for name, add in (("a", 1), ("b", 10)):
        write_adding(package / name / "helper", add)
        write_calling(package / name / "main", "helper")
        put(client, name, package / name)
        config = (adapter.repository / name / "config.pbtxt").read_text()
        assert ("triton_adapter.model.helper" in config) == (name == "b")
    names = names_in_triton(adapter)
    assert {"a", "b", "helper"} < names
    (private,) = names - {"a", "b", "helper"}
    assert private.startswith("ta.p.")
    assert ask(client, "a", 1) == [2]
    assert ask(client, "b", 1) == [11]

    take_down(client, "a")
    assert ask(client, "b", 2) == [12]


def test_helper_may_have_the_packages_name(client: Client, package: Path) -> None:
    write_adding(package / "m", 1)
    write_calling(package / "main", "m")
    put(client, "m", package)
    assert ask(client, "m", 1) == [2]


def test_step_is_found_by_python_code(client: Client, package: Path) -> None:
    write_adding(package / "one", 1)
    write_calling(package / "two", "one")
    write_ensemble(package / "whole", "one", "two")
    put(client, "m", package)
    assert ask(client, "m", 1) == [3]


# -- what is beside -----------------------------------------------------------------------------


def test_missing_backend_is_named_with_the_present(
    adapter: RunningAdapter, client: Client, package: Path
) -> None:
    (package / "net.onnx").write_text("x")
    reply = load(client, "m", package)
    assert reply.status == 400
    text = reply.json()["error"]
    assert str(package) in text
    assert "take a Triton that has the backend onnxruntime" in text
    assert "python" in text.partition("this Triton has ")[2]


@pytest.mark.parametrize("staging", ["copy", pytest.param("hardlink", marks=pytest.mark.nightly)])
def test_models_are_staged_by_other_means_than_links(tmp_path: Path, staging: str) -> None:
    """Hard links need one file system: pytest's folder and the private one are both in /tmp."""
    model = write_adding(tmp_path / "models" / "m", 1)
    write_adding(tmp_path / "models" / "e" / "one", 2)
    write_ensemble(tmp_path / "models" / "e" / "whole", "one", version=None)
    flags = (f"--model-roots={tmp_path / 'models'}", f"--staging={staging}")
    with embedded_adapter(*flags, COMPLETE) as adapter:
        client = adapter.client()
        put(client, "m", model)
        put(client, "e", tmp_path / "models" / "e")
        staged = adapter.repository / "m" / "1" / "model.py"
        assert not staged.is_symlink()
        assert staged.samefile(model / "1" / "model.py") == (staging == "hardlink")
        assert [ask(client, name, 1) for name in "me"] == [[2], [3]]
        # unlike with links, Python's bytecode is not written into the package
        assert [path.name for path in (model / "1").iterdir()] == ["model.py"]
        for name in "me":
            take_down(client, name)
        check_nothing_is_left(adapter)
        client.close()


# -- folders beside the models ---------------------------------------------------------------------


def test_code_finds_the_folder_beside_its_model(client: Client, package: Path) -> None:
    source = package / "source"
    write_reading(source / "net", "common/factor.txt")
    (source / "common").mkdir()
    (source / "common" / "factor.txt").write_text("3")
    put(client, "m", pack(source, package / "m.tar.gz"))
    assert ask(client, "m", 2) == [6]


def write_reading(folder: Path, path: str) -> Path:
    """Write a model that reads a file, by its path from the folder of all models."""
    return write_python_model(
        folder,
        imports="from pathlib import Path",
        initialize=f"""
        repository = Path(args["model_repository"]).parent
        self.factor = float((repository / {path!r}).read_text())
        """,
        answer="values = values * self.factor",
    )


def test_state_lists_the_names_that_a_package_has(
    adapter: RunningAdapter, client: Client, package: Path
) -> None:
    write_reading(package / "net", "common/factor.txt")
    (package / "common").mkdir()
    (package / "common" / "factor.txt").write_text("3")
    put(client, "m", package)
    [model] = adapter.state()["models"]
    assert (model["triton_names"], model["warnings"]) == (["m", "common"], [])


def test_failed_load_says_which_model_has_the_name(client: Client, package: Path) -> None:
    for name in ("first", "second"):
        write_reading(package / name / "net", f"common/{name}.txt")
        (package / name / "common").mkdir()
        (package / name / "common" / f"{name}.txt").write_text("3")
    put(client, "m", package / "first")
    reply = load(client, "n", package / "second")
    assert reply.status == 400
    text = reply.json()["error"]
    assert "No such file or directory: 'common/second.txt'" in text
    assert "does not find the folder 'common' beside them: the model 'm' has this name" in text
    assert ask(client, "m", 2) == [6]


def test_missing_files_whole_path_is_in_error(client: Client, package: Path) -> None:
    write_reading(package / "net", "../common/factor.txt")
    assert "'../common/factor.txt'" in load(client, "m", package).json()["error"]
    write_reading(package / "net", f"{package}/common/factor.txt")
    assert f"'{package}/common/factor.txt'" in load(client, "m", package).json()["error"]


# -- the steps that a config names ----------------------------------------------------------------


def test_configs_steps_are_described_while_served(
    adapter: RunningAdapter, client: Client, package: Path
) -> None:
    """perf_analyzer and model_analyzer ask for the config and the statistics of each."""
    write_adding(package / "first", 1)
    write_adding(package / "second", 2)
    write_ensemble(package / "whole", "first", "second")
    put(client, "m", package)
    config = client.get("/v2/models/m/config").json()
    steps = [step["model_name"] for step in config["ensemble_scheduling"]["step"]]
    assert len(steps) == 2
    paths = [f"/v2/models/{steps[0]}{below}" for below in ("", "/config", "/stats", "/ready")]
    assert [client.get(path).status for path in paths] == [200] * 4
    assert client.get(paths[1]).json()["name"] == steps[0]
    with closing(InferenceServerClient(adapter.grpc)) as calls:
        assert calls.is_model_ready(steps[1])
        assert calls.get_model_metadata(steps[1]).name == steps[1]
        assert calls.get_model_config(steps[1]).config.name == steps[1]
        (statistics,) = calls.get_inference_statistics(steps[1]).model_stats
        assert statistics.name == steps[1]
        assert client.post(f"/v2/models/{steps[0]}/infer", infer_body(1)).status == 404
        take_down(client, "m")
        assert not calls.is_model_ready(steps[1])
    assert [client.get(path).status for path in paths] == [404] * 4

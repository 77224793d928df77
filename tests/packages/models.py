"""Packages of python models for a real Triton, and how to ask for them."""

import io
import tarfile
import zipfile
from pathlib import Path
from textwrap import dedent
from typing import Any

from tests.processes import triton_client
from tests.running import Client, Reply, RunningAdapter
from tests.trees import infer_body, write_python_model

# Without a config.pbtxt the model itself says what it takes.
ALONE = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(0)
        return config

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values + %s)])
"""

_ENDS = """\
platform: "ensemble"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""


def write_alone(path: Path, add: int) -> Path:
    """A model.py that needs no config.pbtxt."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ALONE % add)
    return path


def write_adding(folder: Path, add: int, version: str = "1") -> Path:
    return write_python_model(folder, answer=f"values = values + {add}", version=version)


def write_ensemble(folder: Path, *steps: str, version: str | None = "1") -> Path:
    """The steps one after another; without a version folder when told so."""
    folder.mkdir(parents=True, exist_ok=True)
    if version is not None:
        (folder / version).mkdir()
    names = ["IN", *(f"T{n}" for n in range(1, len(steps))), "OUT"]
    chain = ",\n".join(
        f'{{ model_name: "{step}" model_version: -1'
        f' input_map {{ key: "IN" value: "{names[n]}" }}'
        f' output_map {{ key: "OUT" value: "{names[n + 1]}" }} }}'
        for n, step in enumerate(steps)
    )
    config = f"{_ENDS}ensemble_scheduling {{ step [\n{chain}\n] }}\n"
    (folder / "config.pbtxt").write_text(config)
    return folder


def write_calling(folder: Path, helper: str) -> Path:
    """Asks the helper by name: its own, or the one that the parameter tells."""
    return write_python_model(
        folder,
        imports="import json",
        initialize=f"""\
        helper = {helper!r}
        parameters = json.loads(args["model_config"])["parameters"]
        told = parameters.get("triton_adapter.model." + helper)
        self.helper = told["string_value"] if told else helper
        """,
        answer=dedent("""\
        asked = pb_utils.InferenceRequest(
            model_name=self.helper,
            requested_output_names=["OUT"],
            inputs=[pb_utils.Tensor("IN", values)],
        )
        answered = asked.exec()
        if answered.has_error():
            raise pb_utils.TritonModelException(answered.error().message())
        values = pb_utils.get_output_tensor_by_name(answered, "OUT").as_numpy()
        """),
    )


def pack(folder: Path, archive: Path) -> Path:
    """Pack a folder as the name of the archive says."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as packed:
            for path in sorted(folder.rglob("*")):
                packed.write(path, path.relative_to(folder))
        return archive
    with tarfile.open(archive, "w" if archive.suffix == ".tar" else "w:gz") as packed:
        packed.add(folder, ".")
    return archive


def tar_of(archive: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    """Members as no honest packer would write them."""
    with tarfile.open(archive, "w:gz") as packed:
        for info, content in members:
            info.size = len(content)
            packed.addfile(info, io.BytesIO(content))
    return archive


def load(client: Client, name: str, url: Path | str, **hints: str) -> Reply:
    return client.post("/models", {"model_name": name, "url": str(url), **hints})


def put(client: Client, name: str, url: Path | str, **hints: str) -> None:
    reply = load(client, name, url, **hints)
    assert reply.status == 200, reply.body


def ask(client: Client, name: str, *values: float) -> list[float]:
    reply = client.post(f"/models/{name}/invoke", infer_body(*values))
    assert reply.status == 200, reply.body
    return reply.json()["outputs"][0]["data"]


def take_down(client: Client, name: str) -> None:
    assert client.delete(f"/models/{name}").status == 200


def names_in_triton(adapter: RunningAdapter) -> set[str]:
    client = triton_client(adapter)
    try:
        index: list[dict[str, Any]] = client.post("/v2/repository/index", {}).json()
    finally:
        client.close()
    return {model["name"] for model in index if model.get("state") == "READY"}


def stubs(adapter: RunningAdapter) -> list[str]:
    """Command lines of the python processes that serve models of this adapter."""
    where = f"{adapter.repository}/".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:  # it has just ended
            continue
        if b"stub" in line.split(b"\0")[0] and where in line:
            found.append(line.replace(b"\0", b" ").decode())
    return found


def books(adapter: RunningAdapter) -> tuple[list[str], int, int]:
    """Registry and ledger: models, bytes reserved, and bytes held for none of these models, whose
    own sizes may grow at any time.
    """
    state = adapter.state()
    devices = state["memory"]["devices"].values()
    reserved = sum(book["reserved_bytes"] for book in devices)
    held = sum(book["used_by_models_bytes"] for book in devices)
    of_models = sum(sum(model["bytes"].values()) for model in state["models"])
    return [model["model_id"] for model in state["models"]], reserved, held - of_models

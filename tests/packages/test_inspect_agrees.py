"""What `triton-adapter inspect` says of a package, beside what a load by a real Triton makes of it.

What a load would be refused for is known without one where it can be: each package here says how.
"""

import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from adapter.cli.main import main
from tests.packages.models import load, write_ensemble
from tests.running import Client, RunningAdapter, embedded_adapter
from tests.trees import CONFIG, write_python_model

pytestmark = pytest.mark.triton

Make = Callable[[Path], object]
IN, OUT = (f'name: "{name}" data_type: TYPE_FP32 dims: [-1]' for name in ("IN", "OUT"))
POLL = "failed to poll from model repository"


class Known(Enum):
    """What inspect says of a package."""

    FAULT = "its load is refused"
    ODD = "a warning, without which Triton's refusal of the load would say little"
    HERE = "a warning about this machine or Triton's; a load is refused"
    CODE = "its load is refused by the Python of Triton"
    NOT = "nothing: only a load can tell"
    FINE = "nothing; it is loaded"


@dataclass(frozen=True)
class Case:
    """`words` must be in what inspect says, or in the refusal of the load where it says nothing."""

    name: str
    known: Known
    make: Make
    words: str

    def __str__(self) -> str:
        return self.name


CASES: list[Case] = []


def case(name: str, known: Known, make: Make, words: str = "") -> None:
    CASES.append(Case(name, known, make, words))


def configured(name: str, known: Known, text: str, words: str = "") -> None:
    case(name, known, lambda folder: write_python_model(folder, config=text), words)


def replaced(name: str, known: Known, old: str, new: str, words: str = "") -> None:
    assert old in CONFIG
    configured(name, known, CONFIG.replace(old, new), words)


def added(name: str, known: Known, text: str, words: str = "") -> None:
    configured(name, known, CONFIG + text, words)


def coded(name: str, known: Known, source: str, words: str = "") -> None:
    def make(folder: Path) -> None:
        (write_python_model(folder) / "1" / "model.py").write_text(source)

    case(name, known, make, words)


def alone(name: str, file: str, words: str = "") -> None:
    words = words or f"holds {file}: no model file of a known format"
    case(name, Known.FAULT, lambda folder: (folder / file).write_text("x"), words)


replaced("dims_below_minus_1", Known.FAULT, IN, IN.replace("-1", "-2, 0"), "'IN': dims [-2, 0]")
replaced(
    "dims_of_0", Known.FAULT, IN, IN.replace("-1", "0"), "input 'IN': dims [0]: each must be 1"
)
replaced("output_dims_of_0", Known.FAULT, OUT, OUT.replace("-1", "0"), "output 'OUT': dims [0]")
replaced("input_without_name", Known.FAULT, 'name: "IN" ', "", "an input has no name")
replaced("output_without_name", Known.FAULT, 'name: "OUT" ', "", "an output has no name")
replaced(
    "reshape_of_another_size",
    Known.FAULT,
    IN,
    IN.replace("-1", "4") + " reshape { shape: [5] }",
    "dims [4] and reshape [5]",
)
replaced(
    "reshape_of_0", Known.FAULT, IN, IN + " reshape { shape: [0] }", "reshape [0]: each must be 1"
)
replaced("negative_batch", Known.FAULT, "size: 0", "size: -1", "max_batch_size is -1")
added(
    "preferred_batch_too_large",
    Known.FAULT,
    "dynamic_batching { preferred_batch_size: [8] }",
    "preferred_batch_size 8 is not between 1 and max_batch_size, which is 0",
)
added(
    "gpus_of_a_cpu_group",
    Known.FAULT,
    "instance_group [{ kind: KIND_CPU gpus: [0] }]",
    "KIND_CPU names GPUs: 0",
)
added(
    "version_that_is_not_there",
    Known.FAULT,
    "version_policy { specific { versions: [3] } }",
    "version_policy asks for 3; there is 1",
)
added(
    "no_version_at_all",
    Known.FAULT,
    "version_policy { latest { num_versions: 0 } }",
    "version_policy asks for latest 0",
)
replaced(
    "labels_that_are_not_there",
    Known.FAULT,
    OUT,
    OUT + ' label_filename: "no.txt"',
    "no.txt: no such file",
)
added(
    "warmup_that_is_not_there",
    Known.FAULT,
    'model_warmup [{ name: "w" batch_size: 1 inputs { key: "IN" value '
    '{ data_type: TYPE_FP32 dims: [2] input_data_file: "none" } } }]',
    "warmup/none: no such file",
)
case(
    "latest_version_without_its_model",
    Known.FAULT,
    lambda folder: (write_python_model(folder) / "2").mkdir(),
    "add model.py in version 2; python needs it",
)
added("ensemble_without_steps", Known.FAULT, "ensemble_scheduling { }", "an ensemble without steps")


def wired(name: str, words: str, *maps: tuple[str, str], known: Known = Known.FAULT) -> None:
    """An ensemble IN -> OUT; of each step the tensors that its IN and OUT are."""

    def make(folder: Path) -> None:
        steps = ", ".join(
            f'{{ model_name: "net" model_version: -1 {_map("input", "IN", read)}'
            f" {_map('output', 'OUT', written)} }}"
            for read, written in maps
        )
        write_python_model(folder / "net")
        write_ensemble(folder / "whole", "net")
        config = (folder / "whole" / "config.pbtxt").read_text()
        head = config[: config.index("ensemble_scheduling")]
        text = f"{head}ensemble_scheduling {{ step [ {steps} ] }}"
        (folder / "whole" / "config.pbtxt").write_text(text)

    case(name, known, make, words)


def _map(kind: str, key: str, tensor: str) -> str:
    return f'{kind}_map {{ key: "{key}" value: "{tensor}" }}' if tensor else ""


wired(
    "ensemble_output_of_no_step",
    "whole/config.pbtxt: no step writes the ensemble's output 'OUT'; steps write 'X'",
    ("IN", "X"),
)
wired("ensemble_input_of_no_step", "no step reads the ensemble's input 'IN'", ("X", "OUT"))
wired(
    "ensemble_step_reads_what_nobody_writes",
    "step 2, model 'net', reads 'X', which is neither an input of the ensemble",
    ("IN", "T"),
    ("X", "OUT"),
)
wired(
    "ensemble_tensor_for_nobody",
    "'X' of an output_map is neither an output",
    ("IN", "X"),
    ("IN", "OUT"),
)
wired("ensemble_tensor_written_twice", "'OUT' is in an output_map twice", *[("IN", "OUT")] * 2)
wired(
    "ensemble_of_steps_that_wait_for_each_other",
    "steps wait for each other's outputs: 'net' -> 'net'",
    ("IN", "OUT"),
    ("A", "B"),
    ("B", "A"),
)
wired(
    "ensemble_step_without_inputs",
    "step 2, model 'net', has no input_map",
    ("IN", "OUT"),
    ("", "X"),
)
wired(
    "ensemble_step_without_outputs",
    "step 2, model 'net', has no output_map",
    ("IN", "OUT"),
    ("IN", ""),
)
wired("ensemble_wired_backwards", "", ("T", "OUT"), ("IN", "T"), known=Known.FINE)

replaced(
    "misspelt_field",
    Known.ODD,
    "max_batch_size: 0",
    "max_batchsize: 3",
    "config.pbtxt:2: field 'max_batchsize' is not known to this version's schema; did you mean"
    " max_batch_size?",
)
added(
    "misspelt_field_within_another",
    Known.ODD,
    "dynamic_batching {\n max_queue_delay: 3 }",
    "config.pbtxt:6: field 'max_queue_delay' is not known to this version's schema; did you mean"
    " max_queue_delay_microseconds?",
)
replaced(
    "misspelt_platform",
    Known.ODD,
    'backend: "python"',
    'platform: "tensorflow_savedmodl"',
    "platform 'tensorflow_savedmodl' is not known; did you mean tensorflow_savedmodel?",
)
replaced(
    "platform_for_backend",
    Known.ODD,
    'backend: "python"',
    'platform: "python"',
    "platform 'python' is not known; to name a backend, the field is `backend`",
)
alone("lone_readme", "README.md")
alone("lone_7z", "x.7z")
alone("lone_h5", "model.h5", ": add a model.py that loads model.h5, for the python backend")
alone("lone_pickle", "model.pkl", ": add a model.py that loads model.pkl, for the python backend")
alone("lone_json", "config.json")


def pickle_of_a_version(folder: Path) -> None:
    (folder / "1").mkdir()
    (folder / "1" / "model.pkl").write_text("x")


case(
    "pickle_of_a_version",
    Known.FAULT,
    pickle_of_a_version,
    ": add a model.py that loads 1/model.pkl, for the python backend",
)
case(
    "model_three_folders_down",
    Known.FAULT,
    lambda folder: write_python_model(folder / "a" / "b" / "c"),
    ": give the folder a/b/c itself: its config.pbtxt is too deep",
)


def _zip_in_zip(folder: Path) -> object:
    with zipfile.ZipFile(folder / "outer.zip", "w") as packed:
        packed.writestr("inner.zip", "PK")
    return folder / "outer.zip"


case("zip_in_a_zip", Known.FAULT, _zip_in_zip, "outer.zip: give the content of inner.zip itself")

replaced("misspelt_backend", Known.HERE, '"python"', '"pythonn"', "did you mean python?")
case(
    "onnx_without_the_backend",
    Known.HERE,
    lambda folder: (folder / "net.onnx").write_text("x"),
    "take a Triton that has the backend onnxruntime, or add a model.py that opens the file by",
)
replaced("no_such_backend", Known.HERE, '"python"', '"mine"', "backend 'mine' does not come with")
added(
    "gpu_that_is_not_there",
    Known.HERE,
    "instance_group [{ kind: KIND_GPU gpus: [7] }]",
    "instance_group asks for GPU",
)

coded("syntax_error", Known.CODE, "def x(:\n", "1/model.py:1: SyntaxError: invalid syntax")
coded(
    "python_2", Known.CODE, "a = 1\nprint 'a'\n", "1/model.py:2: SyntaxError: Missing parentheses"
)
coded("tabs_and_blanks", Known.CODE, "if 1:\n\tx=1\n        y=2\n", "1/model.py:3: TabError")
coded("nul_in_the_code", Known.CODE, "x='\0'\n", "1/model.py: SyntaxError: source code")
coded("no_model_class", Known.CODE, "class Model: pass\n", "it has no class TritonPythonModel")

coded(
    "import_of_nothing",
    Known.HERE,
    "import nothing_there_is\nclass TritonPythonModel: pass\n",
    "imports nothing_there_is, which the Python of an embedded Triton does not have",
)
replaced("no_data_type", Known.NOT, "data_type: TYPE_FP32", "", "must specify 'data_type'")
replaced("no_dims", Known.NOT, " dims: [-1]", "", "must specify 'dims'")
added(
    "environment_that_is_not_there",
    Known.NOT,
    'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/nowhere.tar.gz" } }',
    "/nowhere.tar.gz",
)

case("good", Known.FINE, write_python_model)
configured("byte_order_mark", Known.FINE, "\ufeff" + CONFIG)
configured("windows_line_ends", Known.FINE, CONFIG.replace("\n", "\r\n"))
configured("another_name", Known.FINE, 'name: "other"\n' + CONFIG)
added("empty_batching", Known.FINE, "dynamic_batching { }")
added("group_of_no_kind", Known.FINE, "instance_group [{ count: 1 }]")
coded(
    "class_by_assignment",
    Known.FINE,
    "class Mine:\n    def execute(self, requests): return []\nTritonPythonModel = Mine\n",
)


def _policy_beside_an_empty_version(folder: Path) -> None:
    text = CONFIG + "version_policy { specific { versions: [1] } }"
    (write_python_model(folder, config=text) / "2").mkdir()


case("policy_beside_an_empty_version", Known.FINE, _policy_beside_an_empty_version)


def _class_by_import(folder: Path) -> None:
    (write_python_model(folder) / "1" / "model.py").rename(folder / "1" / "base.py")
    code = "import sys, os\nsys.path.insert(0, os.path.dirname(__file__))\nfrom base import *\n"
    (folder / "1" / "model.py").write_text(code)


case("class_by_import", Known.FINE, _class_by_import)


def _modules_of_its_own(folder: Path) -> None:
    (write_python_model(folder) / "1" / "model.py").rename(folder / "1" / "base.py")
    (folder / "above.py").touch()
    (folder / "1" / "model.py").write_text("import above, json.tool\nfrom base import *\n")


case("modules_of_its_own", Known.FINE, _modules_of_its_own)


@pytest.fixture(scope="module")
def completing(model_root: Path) -> Iterator[RunningAdapter]:
    """Triton as it is by default: backends may complete a config."""
    with embedded_adapter(f"--model-roots={model_root}") as adapter:
        yield adapter


@pytest.fixture
def visitor(completing: RunningAdapter) -> Iterator[Client]:
    with closing(completing.client()) as client:
        yield client
        client.delete("/models/m")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inspect_foresees_refusals_of_a_load(
    visitor: Client, package: Path, capsys: pytest.CaptureFixture[str], case: Case
) -> None:
    made = case.make(package)
    url = made if isinstance(made, Path) and made.suffix == ".zip" else package
    code = main(("inspect", str(url), "--json", "--strict"), {})
    said = json.loads(capsys.readouterr().out)
    reply = load(visitor, "m", url)
    refusal = reply.json().get("error", "")

    assert reply.status == (200 if case.known is Known.FINE else 400), refusal
    if case.known in {Known.FAULT, Known.CODE}:
        assert (code, said["code"]) == (1, "InvalidModel")
        assert case.words in said["error"]
        assert refusal == said["error"] or case.known is Known.CODE
    elif case.known in {Known.ODD, Known.HERE}:
        assert code == 3
        [warning] = said["warnings"]
        assert case.words in warning
        if case.known is Known.ODD:
            assert refusal.endswith(f"{POLL}; perhaps because {warning}")
    else:
        assert (code, said["warnings"]) == (0, [])
        assert case.words in refusal


def test_without_strict_warnings_are_no_failure(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_python_model(package, config=f"{CONFIG}novel: 1")
    assert main(("inspect", str(package)), {}) == 0
    assert "warning   " in capsys.readouterr().out

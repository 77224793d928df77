"""Knows Triton's backends, in one table: the files that each opens, and how and where it runs them.

All that depends on a backend is read from the table: which files make a model without a
config.pbtxt, which a model with one must have, what `platform` means, on which GPUs and in how many
processes a model runs, and what opens its files where Triton lacks the backend.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from adapter.core.model import Package
from adapter.packages.messages import did_you_mean, invalid_model

PYTHON = "python"
WITHOUT_BACKEND = "docs/packages.md#without-the-backend"


@dataclass(frozen=True, slots=True)
class Format:
    """Describes files of one kind, which one backend opens."""

    file: str  # the name that the backend opens
    patterns: tuple[str, ...]  # names that callers use; an ending if it begins with a dot
    # fields of the config.pbtxt that Triton needs beside `backend`; None if it needs no config
    config: str | None = None
    is_program: bool = False  # files of other formats beside it are its own, not other models
    is_folder: bool = False  # of TensorFlow: a folder with the pattern's file and `variables`
    companion: str = ""  # the ending of a file of the same name that belongs to it
    has_siblings: bool = False  # the model may refer to files beside it, which keep their places
    is_needed: bool = True  # without such a file no model of the backend can be loaded
    platform: str = ""  # the backend's name in the older field `platform`
    module: str = ""  # of Python, which opens the file as well


@dataclass(frozen=True, slots=True)
class Backend:
    """Describes a backend that comes with Triton; others may be in a package itself."""

    name: str
    formats: tuple[Format, ...]
    runs_in_triton: bool = True  # its models take memory within tritonserver's own process
    is_on_each_gpu: bool = False  # without an instance group Triton makes an instance on each GPU
    reads_tensors: bool = True  # the backend finds inputs and outputs in the file


def _fil(model_type: str, file: str, pattern: str, module: str) -> Format:
    """Return a format of FIL, which opens another file for each `model_type`."""
    value = f'value {{ string_value: "{model_type}" }}'
    return Format(
        file,
        (pattern,),
        config=f'parameters {{ key: "model_type" {value} }}\n',
        is_needed=False,
        module=module,
    )


_MODEL_PY = Format("model.py", ("model.py",), config="", is_program=True)
_DALI_PY = Format("dali.py", ("dali.py",), config="", is_program=True, is_needed=False)
_MODEL_DALI = Format("model.dali", (".dali",), config="", is_program=True, is_needed=False)
_MODEL_JSON = Format(
    "model.json",
    ("model.json",),
    # the engine places itself on its GPUs
    config="instance_group [ { count: 1 kind: KIND_MODEL } ]\n",
    is_program=True,
    is_needed=False,
)
_SAVED_MODEL = Format(
    "model.savedmodel",
    ("saved_model.pb",),
    is_program=True,
    is_folder=True,
    platform="tensorflow_savedmodel",
    module="tensorflow",
)
_GRAPH_DEF = Format(
    "model.graphdef",
    (".graphdef", ".pb"),
    platform="tensorflow_graphdef",
    module="tensorflow",
)
_ONNX = Format(
    "model.onnx",
    (".onnx",),
    has_siblings=True,
    platform="onnxruntime_onnx",
    module="onnxruntime",
)
_PLAN = Format("model.plan", (".plan", ".engine"), platform="tensorrt_plan")
_TORCHSCRIPT = Format(
    "model.pt",
    (".pt", ".pth", ".torchscript"),
    config="",
    platform="pytorch_libtorch",
    module="torch",
)
_OPENVINO = Format("model.xml", (".xml",), companion=".bin", module="openvino")
# An ending such as .json or .txt says something only where the caller said the type.
_XGBOOST_JSON = _fil("xgboost_json", "xgboost.json", ".json", "xgboost")
_XGBOOST_UBJ = _fil("xgboost_ubj", "xgboost.ubj", ".ubj", "xgboost")
_XGBOOST = _fil("xgboost", "xgboost.model", ".model", "xgboost")
_LIGHTGBM = _fil("lightgbm", "model.txt", ".txt", "lightgbm")
_TREELITE = _fil("treelite_checkpoint", "checkpoint.tl", ".tl", "treelite")
_FIL = (
    *(replace(each, patterns=(each.file,)) for each in (_XGBOOST_JSON, _XGBOOST, _LIGHTGBM)),
    _XGBOOST_UBJ,
    _TREELITE,
)

# The order is that in which files are sought: programs first, as what lies beside them is theirs.
_TABLE = (
    Backend(PYTHON, (_MODEL_PY,), runs_in_triton=False, is_on_each_gpu=True),
    Backend("dali", (_DALI_PY, _MODEL_DALI)),
    Backend("vllm", (_MODEL_JSON,), runs_in_triton=False),
    Backend("tensorflow", (_SAVED_MODEL, _GRAPH_DEF), is_on_each_gpu=True),
    Backend("onnxruntime", (_ONNX,), is_on_each_gpu=True),
    Backend("tensorrt", (_PLAN,), is_on_each_gpu=True),
    Backend("pytorch", (_TORCHSCRIPT,), is_on_each_gpu=True, reads_tensors=False),
    Backend("openvino", (_OPENVINO,)),
    Backend("fil", _FIL),
)
BACKENDS: Mapping[str, Backend] = {backend.name: backend for backend in _TABLE}

# Words of callers for the type of a model, each with the formats that it may be of.
_TYPES: Mapping[str, tuple[Format, ...]] = {
    **{backend.name: backend.formats for backend in _TABLE},
    "onnx": (_ONNX,),
    "keras": (_SAVED_MODEL,),
    "openvino_ir": (_OPENVINO,),
    "xgboost": (_XGBOOST_JSON, _XGBOOST_UBJ, _XGBOOST),
    "lightgbm": (_LIGHTGBM,),
}
_BACKENDS_BY_FILE = {each.file: backend for backend in _TABLE for each in backend.formats}
# `platform` is the older field; these are its backends.
BACKENDS_BY_PLATFORM = {
    each.platform: backend.name for backend in _TABLE for each in backend.formats if each.platform
}


def list_formats() -> tuple[Format, ...]:
    """Return the formats of all backends, in the order in which their files are sought."""
    return tuple(each for backend in _TABLE for each in backend.formats)


def formats_of_type(model_type: str | None) -> tuple[Format, ...] | None:
    """Return the formats that a caller's word for a model's type means, such as `tensorflow:1.5`;
    None without a word, and for an unknown one.
    """
    return _TYPES.get((model_type or "").partition(":")[0].lower())


def backend_of_format(file_format: Format) -> str:
    """Return the name of the backend that opens files of a format."""
    return _BACKENDS_BY_FILE[file_format.file].name


def files_needed_by(kind: str) -> tuple[str, ...]:
    """Return the files one of which a model of this backend or platform must have; often none."""
    backend = BACKENDS.get(BACKENDS_BY_PLATFORM.get(kind, kind))
    formats = backend.formats if backend is not None else ()
    meant = (each for each in formats if kind == each.platform or kind in BACKENDS)
    return tuple(each.file for each in meant if each.is_needed)


def library_of(backend: str | None) -> str:
    """Return the name of a backend's library, where the config's `runtime` names no other."""
    return f"libtriton_{backend}.so"


def refuse_missing_backends(package: Package, known: frozenset[str] | None) -> None:
    """Raise InvalidModel for a backend that neither this Triton nor the package has. `known` are
    the names of Triton's backends, None if they are not known.
    """
    needed = package.backends - package.own_backends
    if (fault := describe_missing_backends(needed, known)) is not None:
        raise invalid_model(package.root, fault)


def describe_missing_backends(
    needed: frozenset[str],
    known: frozenset[str] | None,  # Triton's; None if unknown
) -> str | None:
    """Return what to do where a Triton lacks some of these backends; None if it has all."""
    missing = sorted(needed - known) if known is not None else []
    if known is None or not missing:
        return None
    names = ", ".join(missing)
    has = f"this Triton has {', '.join(sorted(known)) or 'none'}"
    misspelt = [name for name in missing if name not in BACKENDS]
    if proposal := did_you_mean(misspelt, known):
        return f"{proposal.removeprefix('; ')} it needs the backend {names}; {has}"
    remedy = f"take a Triton that has the backend {names}"
    modules = _modules_for(missing)
    if modules and PYTHON in known:
        remedy += f", or add a model.py that opens the file by {' or '.join(modules)}"
        remedy += f" ({WITHOUT_BACKEND})"
    return f"{remedy}; {has}"


def _modules_for(backends: Iterable[str]) -> list[str]:
    """Return the modules of Python that open the files of backends, each once."""
    formats = (each for name in backends if name in BACKENDS for each in BACKENDS[name].formats)
    return list(dict.fromkeys(each.module for each in formats if each.module))

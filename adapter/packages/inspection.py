"""Looks at a model folder as a caller hands it over, and says what is wrong with it.

Triton itself only answers "failed to poll from model repository" to most of these faults
(sagemaker.md section 5), so they are found here, each by file and reason. Reads only.
"""

import errno
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.core.model import Package
from adapter.core.sizing import parse_size
from adapter.errors import InvalidModel, InvalidRequest, SourceMissing
from adapter.packages.config_text import BOM
from adapter.packages.contents import Contents, follow, is_within, shown

CONFIG = "config.pbtxt"
# Parsing takes a second a MiB, and other threads wait for the interpreter meanwhile.
MAX_CONFIG_BYTES = 2**20

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}
# Triton passes over version folders with leading zeros.
_VERSION = re.compile(r"[1-9][0-9]*")
# It reads every folder's name with std::stoll, and dies when a number overflows (seen on 2.51).
_NUMBERED = re.compile(r"\s*[+-]?([0-9]+)")
_MODEL_FILES = {
    "python": ("model.py",),
    "onnxruntime": ("model.onnx",),
    "onnxruntime_onnx": ("model.onnx",),
    "tensorrt": ("model.plan",),
    "tensorrt_plan": ("model.plan",),
    "pytorch": ("model.pt",),
    "pytorch_libtorch": ("model.pt",),
    "tensorflow": ("model.savedmodel", "model.graphdef"),
    "tensorflow_savedmodel": ("model.savedmodel",),
    "tensorflow_graphdef": ("model.graphdef",),
    "openvino": ("model.xml",),
}


def inspect(url: str, model_roots: Sequence[Path]) -> Package:
    """Find the model in the folder that `url` names and check it; never reads the weights."""
    roots = [os.path.realpath(root) for root in model_roots]
    try:
        root = _model_folder(_resolve(url, roots), roots)
        contents = Contents(str(root), roots)
        config_text = _read_config(root / CONFIG)
        contents.digest.update(config_text.encode())
        config = _parse(config_text, root / CONFIG)
        _check_model_files(root, config)
        declared_bytes = _declared_bytes(config, root / CONFIG)
    except OSError as error:
        raise InvalidModel(f"{shown(error.filename or url)}: {error.strerror}") from error
    return Package(
        root=str(root),
        config_text=config_text,
        size_bytes=contents.size_bytes,
        declared_bytes=declared_bytes,
        content_key=contents.digest.hexdigest(),
    )


def _local_path(url: str) -> str:
    """The path behind an absolute path or a `file:///` URL; anything else is InvalidRequest."""
    try:
        is_file_url = url.startswith("file:///")
        raw = unquote_to_bytes(url[len("file://") :]) if is_file_url else url.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("url is not valid UTF-8") from error
    path = os.fsdecode(raw)
    if "\0" in path:
        raise InvalidRequest("url holds a NUL")
    if not path.startswith("/"):
        raise InvalidRequest(f"url {url!r} is neither an absolute path nor a file:/// URL")
    return path


def _resolve(url: str, roots: Sequence[str]) -> Path:
    """The real path. What lies outside is refused before anything tells whether it exists."""
    path = _local_path(url)
    if not any(is_within(os.path.realpath(path), root) for root in roots):
        allowed = ", ".join(shown(root) for root in roots)
        raise InvalidRequest(f"url {shown(path)} lies outside the model roots ({allowed})")
    try:
        return Path(os.path.realpath(path, strict=True))
    except OSError as error:
        if error.errno in _ABSENT:
            raise SourceMissing(f"url {shown(path)} does not exist") from error
        raise


def _model_folder(folder: Path, roots: Sequence[str]) -> Path:
    """The folder that holds config.pbtxt: this one, or the only one in it that does."""
    if not folder.is_dir():
        kind = "a file; unpack it" if folder.is_file() else "no folder"
        raise InvalidModel(f"{shown(folder)} is {kind}: a model is a folder with {CONFIG}")
    if os.path.lexists(folder / CONFIG):
        return folder
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    candidates = [entry for entry in found if _may_be_model(entry)]
    if len(candidates) == 1:
        path = candidates[0].path
        return Path(follow(path, roots) if candidates[0].is_symlink() else path)
    if not candidates:
        raise InvalidModel(
            f"{shown(folder)} holds no {CONFIG}, nor does a folder in it; found"
            f" {_listed(entry.name for entry in found)}; expected {CONFIG} beside version"
            " folders such as 1"
        )
    raise InvalidModel(
        f"{shown(folder)} holds several models: {_listed(entry.name for entry in candidates)};"
        " one model per package is supported"
    )


def _may_be_model(entry: os.DirEntry[str]) -> bool:
    """Archives made on a Mac carry a `__MACOSX` folder, a shadow of the real one."""
    if entry.name.startswith(".") or entry.name == "__MACOSX" or not entry.is_dir():
        return False
    return os.path.lexists(Path(entry.path, CONFIG))


def _listed(names: Iterable[str]) -> str:
    """A message names at most ten."""
    texts = [shown(name) for name in names]
    more = f" and {len(texts) - 10} more" if len(texts) > 10 else ""  # noqa: PLR2004 - see above
    return (", ".join(texts[:10]) or "nothing") + more


def _read_config(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(MAX_CONFIG_BYTES + 1)
    if len(raw) > MAX_CONFIG_BYTES:
        raise InvalidModel(f"{shown(path)} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is 0x{raw[error.start]:02x}"
        raise InvalidModel(f"{shown(path)} is not valid UTF-8: {found}") from error
    if not text.removeprefix(BOM).strip():
        raise InvalidModel(f"{shown(path)} is empty")
    return text


def _parse(text: str, path: Path) -> Any:
    """Fields that this schema does not know are no fault: newer Tritons have newer fields."""
    config = ModelConfig()
    try:
        text_format.Parse(text.removeprefix(BOM), config, allow_unknown_field=True)
    except text_format.ParseError as error:
        # the parser quotes the whole line first, however long
        reason = str(error).rpartition("': ")[2][:300]
        place = f"{shown(path)}:{error.GetLine()}:{error.GetColumn()}"
        raise InvalidModel(f"{place}: {reason}") from error
    except RecursionError as error:
        raise InvalidModel(f"{shown(path)} is nested too deeply") from error
    if config.platform == "ensemble" or config.HasField("ensemble_scheduling"):
        raise InvalidModel(f"{shown(path)}: ensembles are not supported; one model per package is")
    for name in (config.default_model_filename, *config.cc_model_filenames.values()):
        if name.startswith("/") or ".." in name.split("/"):
            raise InvalidModel(f"{shown(path)}: model file {name!r} leaves the version folder")
    return config


def _versions(root: Path) -> list[str]:
    found = sorted(path.name for path in root.iterdir() if path.is_dir())
    for name in found:
        if (number := _NUMBERED.match(name)) and int(number[1]) >= 2**63:
            raise InvalidModel(f"{shown(root / name)}: a version number must be below 2**63")
    versions = [name for name in found if _VERSION.fullmatch(name)]
    if not versions:
        raise InvalidModel(f"{shown(root)}: no version folder such as 1; found {_listed(found)}")
    return versions


def _check_model_files(root: Path, config: Any) -> None:
    """What a backend is sure to need. Backends not listed here know best themselves."""
    versions = _versions(root)
    kind = config.platform or config.backend
    # with cc_model_filenames it depends on the GPU
    names = () if config.cc_model_filenames else _MODEL_FILES.get(kind, ())
    if names and config.default_model_filename:
        names = (config.default_model_filename,)
    paths = [root / version / name for version in versions for name in names]
    present = [path for path in paths if path.exists()]
    if names and not present:
        missing = f"{' or '.join(names)} in version {_listed(versions)}"
        raise InvalidModel(f"{shown(root)} holds no {missing}; {kind} needs it")
    for path in present:
        if path.is_file() and not path.stat().st_size:
            raise InvalidModel(f"{shown(path)} is empty")


def _declared_bytes(config: Any, path: Path) -> int | None:
    if "memory_bytes" not in config.parameters:
        return None
    try:
        return parse_size(config.parameters["memory_bytes"].string_value)
    except (ValueError, OverflowError) as error:
        raise InvalidModel(f"{shown(path)}: parameter memory_bytes: {error}") from error

"""Writes the model files of a request to a folder, and reads a folder for an upload to Triton.

Both are loads of the model repository extension, with `config` and `file:<version>/<name>`.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.core.model import ModelSource, Payload
from adapter.errors import InvalidRequest
from adapter.packages.config import is_ensemble, parse, read_config
from adapter.packages.contents import CONFIG, OWN_NAMES
from adapter.packages.messages import cut, invalid_model, listed
from adapter.packages.roots import Inside

# A protobuf message has at most 2 GiB; some of that is left for the framing.
MAX_UPLOAD_BYTES = 2**31 - 2**20
_FRAMING_BYTES = 64  # of one file in the message, an upper bound


def config_text(given: dict[str, Any]) -> str:
    """Convert a ModelConfig in JSON to config.pbtxt; InvalidRequest names unknown fields."""
    if unknown := sorted(set(_find_unknown(given, ModelConfig.DESCRIPTOR, ""))):
        raise InvalidRequest(f"config: no such field of a ModelConfig: {listed(unknown)}")
    config = ModelConfig()
    try:
        json_format.ParseDict(given, config)
    except (json_format.ParseError, ValueError) as error:
        raise InvalidRequest(f"config is not a ModelConfig: {str(error)[:300]}") from error
    return text_format.MessageToString(config)


def _find_unknown(given: object, message: Any, place: str) -> Iterator[str]:
    """Yield the paths of the fields of a JSON value that `message`, a descriptor of protobuf, does
    not have. `place` is the path of the value itself.
    """
    if isinstance(given, list):
        for item in given:
            yield from _find_unknown(item, message, place)
    elif isinstance(given, dict):
        is_map = message.GetOptions().map_entry
        for name, value in given.items():
            fields = message.fields_by_name
            field = None
            if is_map or name.isascii():  # protobuf raises SystemError for half a surrogate pair
                field = fields.get("value" if is_map else name)
                field = field or message.fields_by_camelcase_name.get(name)
            if field is None:
                yield cut(f"{place}{name}")
            elif field.message_type is not None:
                yield from _find_unknown(value, field.message_type, f"{place}{name}.")


def write_package(folder: Path, source: ModelSource) -> None:
    """Create `folder` with the files of the request.

    Modification times are derived from the contents, as the key of learned sizes depends on them.
    Raises the OSError of the disk.
    """
    folder.mkdir()
    config = [(CONFIG, source.config.encode())] if source.config else []
    for name, content in (*config, *source.files):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        moment = int.from_bytes(hashlib.sha256(content).digest()[:4])
        os.utime(path, (moment, moment))


def payload(folder: Path, roots: Sequence[str]) -> Payload:
    """Read a staged folder into memory, following links within it and the roots.

    Raises InvalidModel for files that cannot be uploaded; they are named as in the folder.
    """
    name = Path(folder.name)
    try:
        config = _read_config(folder, name)
        real = os.path.realpath(folder)
        inside = Inside([*roots, real])
        entries = inside.tree(real, without=OWN_NAMES)
        sizes = {file: entry.status.st_size for file, entry in entries if not entry.is_folder}
        _refuse_too_large(sizes, name)
        files = {
            f"file:{f}": _read_content(inside, f"{real}/{f}", size) for f, size in sizes.items()
        }
        return Payload(config, files)
    except OSError as error:
        raise invalid_model(error.filename or folder, str(error.strerror)) from error


def _read_config(folder: Path, name: Path) -> str:
    """Return the config of a staged folder as JSON; without a config.pbtxt an empty one, which
    Triton completes. Raise InvalidModel for a config that cannot be uploaded.
    """
    if not (folder / CONFIG).exists():
        return "{}"
    checked = parse(read_config(folder / CONFIG), name / CONFIG)
    if checked.warnings:
        lost = "an upload takes the config as JSON, in which something would be lost"
        raise invalid_model(name / CONFIG, f"{lost}: {checked.warnings[0]}")
    if is_ensemble(checked.config):
        raise invalid_model(
            name / CONFIG,
            "an ensemble cannot be uploaded: Triton looks for its steps in its own repository",
        )
    return json_format.MessageToJson(checked.config, preserving_proto_field_name=True, indent=None)


def _refuse_too_large(sizes: dict[str, int], name: Path) -> None:
    """Raise InvalidModel if files of these sizes are too large for one call to Triton together, or
    have names that cannot be sent.
    """
    total = 0
    for file, size in sizes.items():
        try:
            total += len(file.encode()) + _FRAMING_BYTES + size
        except UnicodeEncodeError as error:
            fault = "its name is not UTF-8, so it cannot be sent"
            raise invalid_model(name / file, fault) from error
    if total > MAX_UPLOAD_BYTES:
        limit = f"Triton takes at most {MAX_UPLOAD_BYTES} in one call"
        raise invalid_model(name, f"{total} bytes to upload; {limit}")


def _read_content(inside: Inside, path: str, size: int) -> bytes:
    """Return the first `size` bytes of a file, as many as were counted: it may have grown since."""
    with inside.reading(path) as file:
        return file.read(size)

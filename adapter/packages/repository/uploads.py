"""Models that travel in a request: out of a caller's into a folder, out of a folder into Triton's.

Both are the model repository extension's load with `config` and `file:<version>/<name>`.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.core.model import ModelSource
from adapter.errors import InvalidModel, InvalidRequest
from adapter.packages.config.check import parse, read_config
from adapter.packages.source.backends import MARKER, UNPACKED, is_ensemble
from adapter.packages.source.confined import Inside
from adapter.packages.source.contents import shown
from adapter.packages.source.inspection import CONFIG

# A protobuf message, thus a call over gRPC, has at most 2 GiB; some of it is left for the framing.
MAX_UPLOAD_BYTES = 2**31 - 2**20
_FRAMING_BYTES = 64  # of one file in the message, generously


@dataclass(frozen=True, slots=True)
class Payload:
    """`config` is JSON with the field names of config.pbtxt; the keys of `files` begin `file:`."""

    config: str
    files: dict[str, bytes]


def config_text(given: dict[str, Any]) -> str:
    """A ModelConfig as JSON has it -> config.pbtxt. InvalidRequest names the fields it lacks."""
    if unknown := sorted(set(_unknown(given, ModelConfig.DESCRIPTOR, ""))):
        raise InvalidRequest(f"config: no such field of a ModelConfig: {', '.join(unknown[:10])}")
    config = ModelConfig()
    try:
        json_format.ParseDict(given, config)
    except (json_format.ParseError, ValueError) as error:
        raise InvalidRequest(f"config is not a ModelConfig: {str(error)[:300]}") from error
    return text_format.MessageToString(config)


def _unknown(given: object, message: Any, place: str) -> Iterator[str]:
    """The paths of fields that `message`, a descriptor, does not have."""
    if isinstance(given, list):
        for item in given:
            yield from _unknown(item, message, place)
    elif isinstance(given, dict):
        is_map = message.GetOptions().map_entry
        for name, value in given.items():
            fields = message.fields_by_name
            field = fields.get("value" if is_map else name)
            field = field or message.fields_by_camelcase_name.get(name)
            if field is None:
                yield f"{place}{name}"[:100]
            elif field.message_type is not None:
                yield from _unknown(value, field.message_type, f"{place}{name}.")


def write_package(folder: Path, source: ModelSource, package: Path | None) -> None:
    """Make `folder` with what the request brought, besides links to what `package` has.

    Times are made of the contents: learned sizes go by them. InvalidModel when a config is to
    stand in for that of a lone file; OSError when the disk refuses.
    """
    if package is not None and not package.is_dir():
        raise InvalidModel(f"{shown(package)} is no folder, so no config can stand in for its own")
    folder.mkdir()
    for entry in package.iterdir() if package is not None else ():
        if entry.name not in {CONFIG, MARKER}:
            (folder / entry.name).symlink_to(entry)
    config = [(CONFIG, source.config.encode())] if source.config else []
    for name, content in (*config, *source.files):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        moment = int.from_bytes(hashlib.sha256(content).digest()[:4])
        os.utime(path, (moment, moment))


def payload(folder: Path, roots: Sequence[str]) -> Payload:
    """What a staged folder shows, links followed within it and the roots, read into memory.

    InvalidModel for what Triton cannot be sent; files are named as in the folder.
    """
    name = Path(folder.name)
    try:
        config, real = _config(folder, name), os.path.realpath(folder)
        inside, own = Inside([*roots, real]), frozenset({UNPACKED, CONFIG, MARKER})
        seen = inside.tree(real, without=own)
        sizes = {file: found.status.st_size for file, found in seen if not found.is_folder}
        _refuse_too_large(sizes, name)
        files = {f"file:{f}": _content(inside, f"{real}/{f}", size) for f, size in sizes.items()}
        return Payload(config, files)
    except OSError as error:
        raise InvalidModel(f"{shown(error.filename or folder)}: {error.strerror}") from error


def _config(folder: Path, name: Path) -> str:
    """Without a config.pbtxt Triton completes it, as it does on disk."""
    if not (folder / CONFIG).exists():
        return "{}"
    checked = parse(read_config(folder / CONFIG), name / CONFIG)
    if checked.warnings:
        raise InvalidModel(
            f"{checked.warnings[0]}; it would be lost in an upload, which takes the config as JSON"
        )
    if is_ensemble(checked.config):
        raise InvalidModel(
            f"{shown(name / CONFIG)}: an ensemble cannot be uploaded: Triton looks for its steps"
            " in its own repository"
        )
    return json_format.MessageToJson(checked.config, preserving_proto_field_name=True, indent=None)


def _refuse_too_large(sizes: dict[str, int], name: Path) -> None:
    total = 0
    for file, size in sizes.items():
        try:
            total += len(file.encode()) + _FRAMING_BYTES + size
        except UnicodeEncodeError as error:
            where = shown(name / file)
            raise InvalidModel(f"{where}: its name is not UTF-8, so it cannot be sent") from error
    if total > MAX_UPLOAD_BYTES:
        raise InvalidModel(
            f"{shown(name)}: {total} bytes to upload; Triton takes at most {MAX_UPLOAD_BYTES}"
            " in one call"
        )


def _content(inside: Inside, path: str, size: int) -> bytes:
    """As much as was counted: the file may grow meanwhile."""
    with inside.reading(path) as file:
        return file.read(size)

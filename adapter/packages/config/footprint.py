"""Reads from a config how much memory a model takes, and on which devices."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from adapter.core.sizing import parse_size
from adapter.errors import AdapterError, InvalidModel
from adapter.packages.config.check import parse, read_config
from adapter.packages.source.backends import is_ensemble
from adapter.packages.source.contents import CONFIG, shown
from adapter.packages.source.location import resolve
from adapter.runtime import clock

_PARAMETER = "memory_bytes"


def declared_bytes(config: ModelConfig | None, path: Path) -> int | None:
    """Return the size in the config, None without one; InvalidModel if it is not a size.

    `path` is the config's, for the message.
    """
    if config is None or _PARAMETER not in config.parameters:
        return None
    text = config.parameters[_PARAMETER].string_value
    try:
        return parse_size(text)
    except (ValueError, OverflowError) as error:
        raise InvalidModel(
            f"{shown(path)}: parameter {_PARAMETER}: {text[:100]!r}: {error}"
        ) from error


def gpus(configs: Iterable[ModelConfig | None]) -> frozenset[int] | None:
    """Return the CUDA numbers of the GPUs that all of the models name together.

    None if one of them leaves the choice to Triton or to its backend: it has no config, no instance
    group, or a group that is neither for CPUs nor names GPUs.
    """
    named: set[int] = set()
    for config in configs:
        if config is not None and is_ensemble(config):
            continue  # only its steps run
        groups = config.instance_group if config is not None else ()
        if not groups:
            return None
        for group in groups:
            if group.kind == ModelInstanceGroup.KIND_CPU:
                continue
            if not group.gpus:
                return None
            named.update(group.gpus)
    return frozenset(named)


def quick_size(url: str, roots: Sequence[str], end: float) -> tuple[int | None, int]:
    """Return the sum that the configs declare, None without any, and the bytes of all files; 0 when
    they cannot be read, or not all of them until `end` (time.monotonic).
    """
    configs: list[Path] = []
    found = 0
    try:
        path = resolve(url, roots)
        if path.is_file():
            return None, path.stat().st_size
        for folder, _, names in os.walk(path):
            if clock.monotonic() > end:
                return None, 0
            found += sum(Path(folder, name).stat().st_size for name in names)
            configs += [Path(folder, CONFIG)] if CONFIG in names else []
    except (AdapterError, OSError):
        return None, 0
    sizes = [size for config in configs if (size := _declared(config)) is not None]
    return (sum(sizes) if sizes else None), found


def _declared(config: Path) -> int | None:
    try:
        # reading a pipe of that name would block for ever
        text = read_config(config) if config.is_file() else ""
        return declared_bytes(parse(text, config).config, config)
    except (AdapterError, OSError):  # the load reports what is wrong with it
        return None

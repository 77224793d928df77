"""Reads from a config how much memory a model takes, and on which devices."""

from collections.abc import Iterable
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from adapter.core.sizing import parse_size
from adapter.errors import InvalidModel
from adapter.packages.source.backends import is_ensemble
from adapter.packages.source.contents import shown

_PARAMETER = "memory_bytes"


def declared_bytes(config: ModelConfig | None, path: Path) -> int | None:
    """Return the size in the config, None without one; InvalidModel if it is not a size.

    `path` is the config's, for the message.
    """
    if config is None or _PARAMETER not in config.parameters:
        return None
    try:
        return parse_size(config.parameters[_PARAMETER].string_value)
    except (ValueError, OverflowError) as error:
        raise InvalidModel(f"{shown(path)}: parameter {_PARAMETER}: {error}") from error


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

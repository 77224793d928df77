"""Reads from a config which content types a model opted into, and what it says of its memory."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import (
    DataType,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
)

from adapter.codecs import CONTENT_TYPES_PARAMETER, content_types
from adapter.core.byte_sizes import parse_size
from adapter.core.tensors import ContentTypes, Tensor
from adapter.errors import AdapterError
from adapter.packages.backends import BACKENDS, PYTHON
from adapter.packages.config import is_ensemble, parse, read_config
from adapter.packages.config_text import tokens_of
from adapter.packages.contents import CONFIG
from adapter.packages.members import ENTRY_PARAMETER
from adapter.packages.messages import cut, invalid_model, shown

# How near a name must be to be taken for a misspelt one.
_NEAR = 0.75
_MEMORY_PARAMETER = "memory_bytes"


def read_content_types(config: ModelConfig, text: str, path: Path) -> ContentTypes | None:
    """Return the content types that a config opts into by a parameter; None without the parameter.
    Raise InvalidModel for types that do not fit the model's tensors.

    `text` is what stands in the file at `path`, for the message.
    """
    if CONTENT_TYPES_PARAMETER not in config.parameters:
        return None
    try:
        return content_types(
            config.parameters[CONTENT_TYPES_PARAMETER].string_value,
            _tensors(config.input),
            _tensors(config.output),
            is_batched=config.max_batch_size > 0,
        )
    except ValueError as error:
        raise invalid_model(
            f"{path}:{_find_line(text)}", f"parameter {CONTENT_TYPES_PARAMETER}: {error}"
        ) from error


def find_misspelt_parameters(config: ModelConfig, path: Path) -> tuple[str, ...]:
    """Return a warning for each parameter whose name is almost one that the adapter reads."""
    known = [CONTENT_TYPES_PARAMETER, ENTRY_PARAMETER]
    warnings = []
    for name in sorted(set(config.parameters) - set(known)):
        for near in get_close_matches(name.lower()[:100], known, 1, _NEAR):
            text = f"says nothing to the adapter; did you mean {near}?"
            warnings.append(f"{shown(path)}: parameter {cut(name)!r} {text}")
    return tuple(warnings)


def is_declared_entry(config: ModelConfig, path: Path) -> bool:
    """Return whether the config declares its model to be the package's entry.

    `path` is the config's, for the message.
    """
    if ENTRY_PARAMETER not in config.parameters:
        return False
    text = config.parameters[ENTRY_PARAMETER].string_value
    if text not in {"true", "false"}:
        fault = f"parameter {ENTRY_PARAMETER}: {cut(text)!r} is neither true nor false"
        raise invalid_model(path, fault)
    return bool(text == "true")


def staged_content_types(folder: Path) -> ContentTypes | None:
    """Return the content types of a model that an earlier run staged in a folder; None if it has
    none, or if its config cannot be read.
    """
    path = folder / CONFIG
    try:
        text = read_config(path)
        return read_content_types(parse(text, path).config, text, path)
    except (AdapterError, OSError):  # Triton completes one by itself where there is none
        return None


def _tensors(tensors: Iterable[ModelInput | ModelOutput]) -> tuple[Tensor, ...]:
    """Return a config's inputs or outputs in the terms of V2."""
    return tuple(Tensor(each.name, _datatype(each), tuple(each.dims)) for each in tensors)


def _datatype(tensor: ModelInput | ModelOutput) -> str:
    """Return V2's name of a tensor's data type."""
    name = DataType.Name(tensor.data_type).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def _find_line(text: str) -> int:
    """Return the line on which a config last names the parameter of content types."""
    lines = [
        text.count("\n", 0, token.start()) + 1
        for token in tokens_of(text)
        if token[0][1:-1] == CONTENT_TYPES_PARAMETER
    ]
    return lines[-1] if lines else 1


def read_declared_bytes(config: ModelConfig | None, path: Path) -> int | None:
    """Return the bytes of memory that a config says its model takes; None if it says nothing. Raise
    InvalidModel if that is not a size.

    `path` is the config's, for the message.
    """
    if config is None or _MEMORY_PARAMETER not in config.parameters:
        return None
    text = config.parameters[_MEMORY_PARAMETER].string_value
    try:
        return parse_size(text)
    except (ValueError, OverflowError) as error:
        raise invalid_model(
            path, f"parameter {_MEMORY_PARAMETER}: {cut(text)!r}: {error}"
        ) from error


def list_gpus(configs: Iterable[ModelConfig | None]) -> frozenset[int] | None:
    """Return the CUDA numbers of the GPUs that all of the models name together.

    None if one of them leaves the choice to Triton or to its backend: it has no config, no instance
    group, or a group that is neither for CPUs nor names GPUs.
    """
    named: set[int] = set()
    for config in configs:
        if config is not None and is_ensemble(config):
            continue  # an ensemble itself runs nowhere: its steps do
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


def leaves_gpu_open(models: Iterable[tuple[str | None, ModelConfig | None]]) -> bool:
    """Return whether some of these models run on GPUs, and all leave it to Triton on which."""
    are_open = [
        _is_gpu_open(config, backend)
        for backend, config in models
        if config is None or not is_ensemble(config)
    ]
    return any(are_open) and None not in are_open


def _is_gpu_open(config: ModelConfig | None, backend: str | None) -> bool | None:
    """Return whether the model runs on whichever GPUs Triton chooses; None where its config names
    some, or its backend chooses; False where it runs on CPUs.
    """
    groups = config.instance_group if config is not None else ()
    if any(group.gpus or group.kind == ModelInstanceGroup.KIND_MODEL for group in groups):
        return None
    if not groups:
        known = BACKENDS.get(backend or "")
        return True if known is not None and known.is_on_each_gpu else None
    return any(group.kind != ModelInstanceGroup.KIND_CPU for group in groups)


def count_processes(models: Iterable[tuple[str | None, ModelConfig | None]]) -> int | None:
    """Return among how many processes the memory of these models on one GPU is divided at most.

    None where a backend is not known: those written in Python run processes of their own.
    """
    of_python = 0
    in_triton = 0
    for backend, config in models:
        groups = config.instance_group if config is not None else ()
        known = BACKENDS.get(backend or "")
        if backend == PYTHON:
            on_gpus = [group for group in groups if group.kind != ModelInstanceGroup.KIND_CPU]
            of_python += sum(max(1, group.count) for group in on_gpus) if groups else 1
        elif known is not None and known.runs_in_triton:
            in_triton = 1
        elif config is None or not is_ensemble(config):
            return None
    return of_python + in_triton

"""Reads from a config which content types a model opted into."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput

from adapter.errors import AdapterError, InvalidModel
from adapter.packages.config.check import parse, read_config
from adapter.packages.config.text import tokens_of
from adapter.packages.source.contents import CONFIG, shown
from adapter.protocols.content_types import PARAMETER, ContentTypes, content_types
from adapter.protocols.tensors import Tensor

# How near a name must be to be taken for a misspelt one.
_NEAR = 0.75


def read_content_types(config: ModelConfig, text: str, path: Path) -> ContentTypes | None:
    """Return None for a model that did not opt in; InvalidModel for what it cannot opt into.

    `text` is what stands in the file at `path`, for the message.
    """
    if PARAMETER not in config.parameters:
        return None
    try:
        return content_types(
            config.parameters[PARAMETER].string_value,
            _tensors(config.input),
            _tensors(config.output),
            is_batched=config.max_batch_size > 0,
        )
    except ValueError as error:
        place = f"{shown(path)}:{_line(text)}"
        raise InvalidModel(f"{place}: parameter {PARAMETER}: {error}") from error


def misspelt(config: ModelConfig, path: Path) -> tuple[str, ...]:
    """Warn of parameters whose names are almost that of the list."""
    names = {name.lower()[:100]: name for name in config.parameters if name != PARAMETER}
    near = [names[name] for name in names if get_close_matches(name, [PARAMETER], 1, _NEAR)]
    text = f"says nothing to the adapter; did you mean {PARAMETER}?"
    return tuple(f"{shown(path)}: parameter {name[:100]!r} {text}" for name in sorted(near))


def staged_content_types(folder: Path) -> ContentTypes | None:
    """Return those of a model that was staged before."""
    path = folder / CONFIG
    try:
        text = read_config(path)
        return read_content_types(parse(text, path).config, text, path)
    except (AdapterError, OSError):  # Triton completes one by itself where there is none
        return None


def _tensors(tensors: Iterable[ModelInput | ModelOutput]) -> tuple[Tensor, ...]:
    return tuple(Tensor(each.name, _datatype(each), tuple(each.dims)) for each in tensors)


def _datatype(tensor: ModelInput | ModelOutput) -> str:
    """Return V2's name of the type."""
    name = DataType.Name(tensor.data_type).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def _line(text: str) -> int:
    """Return the line of the parameter's name; the last of them counts."""
    lines = [
        text.count("\n", 0, token.start()) + 1
        for token in tokens_of(text)
        if token[0][1:-1] == PARAMETER
    ]
    return lines[-1] if lines else 1

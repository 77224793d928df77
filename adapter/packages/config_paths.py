"""Refuses configurations that name files outside the model's own folder, or text for a shell.

Triton joins such a name to the model's folder and reads what is there: with `label_filename`
`../../etc/passwd` a classification returns the lines of that file. Every string field of a
ModelConfig is in one table below, and a test fails for a field of a newer schema that is in none.

A package may bring code, so its own config may name a library or an environment anywhere on the
machine. The `config` of a load call may come from a caller who brings none: there such a path must
lie within the model roots.
"""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.packages.backends import PYTHON
from adapter.packages.contents import is_within
from adapter.packages.messages import cut

# Names of files, and the folder that Triton joins each to.
FILES = {
    "output.label_filename": "the model's folder",
    "model_warmup.inputs.value.input_data_file": "the model's folder warmup",
    "sequence_batching.state.initial_state.data_file": "the model's folder initial_state",
    "default_model_filename": "the version folder",
    "cc_model_filenames.value": "the version folder",
}
# Names that Triton makes the path of a backend or of an agent from, and those of accelerators,
# which a backend looks up as it likes.
NAMES = frozenset(
    {
        "platform",
        "backend",
        "runtime",
        "model_repository_agents.agents.name",
        "optimization.execution_accelerators.gpu_execution_accelerator.name",
        "optimization.execution_accelerators.cpu_execution_accelerator.name",
    }
)
# Names that the python backend puts into a command of a shell, as part of an instance's name.
SHELL_WORDS = frozenset({"instance_group.name"})
# Paths of libraries, which are opened as they are: relative to the folder that Triton runs in.
LIBRARIES = frozenset({"model_operations.op_library_filename"})
# The value of a parameter, which its key decides on.
PARAMETER = "parameters.value.string_value"
# Values of other parameters. Some backends and agents take some of them for paths.
VALUES = frozenset(
    {
        "model_repository_agents.agents.parameters.value",
        "optimization.execution_accelerators.gpu_execution_accelerator.parameters.value",
        "optimization.execution_accelerators.cpu_execution_accelerator.parameters.value",
    }
)
# Names of tensors and metrics, and keys: no part of any path.
NO_PATHS = frozenset(
    {
        "name",
        "input.name",
        "output.name",
        "batch_input.target_name",
        "batch_input.source_input",
        "batch_output.target_name",
        "batch_output.source_input",
        "optimization.cuda.graph_spec.input.key",
        "optimization.cuda.graph_spec.graph_lower_bound.input.key",
        "optimization.execution_accelerators.gpu_execution_accelerator.parameters.key",
        "optimization.execution_accelerators.cpu_execution_accelerator.parameters.key",
        "sequence_batching.control_input.name",
        "sequence_batching.state.input_name",
        "sequence_batching.state.output_name",
        "sequence_batching.state.initial_state.name",
        "ensemble_scheduling.step.model_name",
        "ensemble_scheduling.step.model_namespace",
        "ensemble_scheduling.step.input_map.key",
        "ensemble_scheduling.step.input_map.value",
        "ensemble_scheduling.step.output_map.key",
        "ensemble_scheduling.step.output_map.value",
        "instance_group.rate_limiter.resources.name",
        "instance_group.profile",
        "instance_group.host_policy",
        "cc_model_filenames.key",
        "metric_tags.key",
        "metric_tags.value",
        "parameters.key",
        "model_warmup.name",
        "model_warmup.inputs.key",
        "model_repository_agents.agents.parameters.key",
        "model_metrics.metric_control.metric_identifier.family",
    }
)

_SHELL_WORD = re.compile(r"[A-Za-z0-9._-]*")
# The parameters that Triton and its python backend themselves take for paths.
BATCHING_LIBRARY = "TRITON_BATCH_STRATEGY_PATH"
ENVIRONMENT = "EXECUTION_ENV_PATH"
# The python backend replaces this prefix with the model's folder.
MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY/"
_OUTSIDE = "is outside the model roots, and the config of a load call may name no such path"


def find_path_faults(
    config: ModelConfig,
    call_roots: Sequence[str] | None,  # real paths; None for a package's own config
) -> Iterator[str]:
    """Yield a fault for each path in a config that leads out of the model's folder. `call_roots`
    are the folders that the config of a load call may name besides.
    """
    for place, text in _list_strings(config):
        if place not in NO_PATHS and place != PARAMETER:
            yield from _find_field_faults(place, text, call_roots)
    for key, parameter in config.parameters.items():
        text = parameter.string_value
        if key == BATCHING_LIBRARY:
            yield from _find_library_faults(key, text, call_roots)
        elif key == ENVIRONMENT:
            yield from _find_environment_faults(text, call_roots)
        elif config.backend != PYTHON:  # the code of a python model reads its own
            yield from _find_value_faults(f"parameter {cut(key)}", text, call_roots)


def _find_field_faults(place: str, text: str, call_roots: Sequence[str] | None) -> Iterator[str]:
    """Yield the fault of the text of a string field, whose name is `place`. `call_roots` are as for
    `find_path_faults`.
    """
    if place in LIBRARIES:
        yield from _find_library_faults(place, text, call_roots)
    elif place in VALUES:
        yield from _find_value_faults(place, text, call_roots)
    elif place in SHELL_WORDS:
        if _SHELL_WORD.fullmatch(text) is None:
            yield f"{place} {cut(text)!r} has characters other than letters, digits and . _ -"
    elif place in NAMES:
        if "/" in text or text in {".", ".."} or "\0" in text:
            yield f"{place} {cut(text)!r} is not a name: it is part of a path"
    elif _leaves(text):
        folder = FILES.get(place, "the model's folder")
        yield f"{place} {cut(text)!r} leaves {folder}"


def _find_library_faults(name: str, text: str, call_roots: Sequence[str] | None) -> Iterator[str]:
    """Yield the fault of a library's path: a part `..`, or, in the config of a load call, a folder
    outside of its roots. A name alone is looked up where Triton's libraries are.
    """
    if ".." in text.split("/"):
        yield f"{name} {cut(text)!r} has a part '..'"
    elif call_roots is not None and "/" in text and not _is_inside(text, call_roots):
        yield f"{name} {cut(text)!r} {_OUTSIDE}"


def _find_environment_faults(text: str, call_roots: Sequence[str] | None) -> Iterator[str]:
    """Yield the fault of the path of a Python environment: within the model's folder if it begins
    like MODEL_FOLDER, else judged as a library's path where the config came with a load call.
    """
    if text.startswith(MODEL_FOLDER):
        place = os.path.normpath(text.removeprefix(MODEL_FOLDER).lstrip("/"))
        if _leaves(place):
            yield f"{ENVIRONMENT} leaves the model's folder: {cut(text)!r}"
    elif call_roots is not None:
        yield from _find_library_faults(ENVIRONMENT, text, call_roots)


def _find_value_faults(name: str, text: str, call_roots: Sequence[str] | None) -> Iterator[str]:
    """Yield the fault of a value that may be a path, where the config came with a load call: `name`
    is what has the value.
    """
    if call_roots is not None and _leaves(text) and not _is_inside(text, call_roots):
        yield f"{name} {cut(text)!r} {_OUTSIDE}"


def _leaves(text: str) -> bool:
    """Return whether a path is absolute, or may lead out of the folder that it is joined to.

    No part may be `..`: behind a link it leads to where the link's target is.
    """
    return text.startswith("/") or ".." in text.split("/") or "\0" in text


def _is_inside(text: str, roots: Sequence[str]) -> bool:
    """Return whether a text is an absolute path whose target, links followed, is within `roots`."""
    if not text.startswith("/") or "\0" in text:
        return False
    real = os.path.realpath(text)
    return any(is_within(real, root) for root in roots)


def _list_strings(message: Message, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the strings that are set in a message, each with the names of the fields that lead to
    it.
    """
    for field, value in message.ListFields():
        place = above + field.name
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            kinds = field.message_type.fields_by_name
            for key, item in value.items():
                yield from _list_values(kinds["key"], key, f"{place}.key")
                yield from _list_values(kinds["value"], item, f"{place}.value")
        else:
            yield from _list_values(field, value, place)


def _list_values(field: FieldDescriptor, value: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield the strings of a field with its name, `place`, and those of the messages in it."""
    if field.type == FieldDescriptor.TYPE_STRING:
        texts = [value] if isinstance(value, str) else value
        for text in texts:
            yield place, text
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        messages = [value] if isinstance(value, Message) else value
        for message in messages:
            yield from _list_strings(message, f"{place}.")

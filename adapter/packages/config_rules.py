"""Refuses configurations that Triton refuses or that end it, whatever the model file says.

Only values that are wrong in themselves: what is missing, a backend may complete from the model.
To many of these, and to all faults of an ensemble's tensors, Triton only answers "failed to poll
from model repository" (docs/design/triton.md).
"""

import graphlib
import math
import re
from collections.abc import Iterator

from tritonclient.grpc.model_config_pb2 import (
    ModelConfig,
    ModelEnsembling,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
)

from adapter.packages.messages import cut, listed, quoted_list

# Triton 2.51 makes the label `_KEY` of it, and ends if that is no name of a label.
_TAG = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9_]*)?")


def served_versions(config: ModelConfig, versions: list[str]) -> list[str]:
    """Return the versions that the config's policy has Triton serve; by default the latest one.

    Raises ValueError, with the reason, if there is none.
    """
    policy = config.version_policy
    kind = policy.WhichOneof("policy_choice")
    numbered = sorted(versions, key=int)
    if kind == "all":
        served = numbered
    elif kind == "specific":
        served = [version for version in numbered if int(version) in policy.specific.versions]
    else:
        count = policy.latest.num_versions if kind == "latest" else 1
        served = numbered[-count:] if count else []
    if not served:
        asked = listed(policy.specific.versions) if kind == "specific" else "latest 0"
        raise ValueError(f"version_policy asks for {asked}; there is {', '.join(numbered)}")
    return served


def find_config_faults(config: ModelConfig) -> Iterator[str]:
    """Yield the values of a config that are wrong in themselves, each with its field and reason."""
    if config.max_batch_size < 0:
        yield f"max_batch_size is {config.max_batch_size}; it must be 0, for no batching, or more"
    for size in config.dynamic_batching.preferred_batch_size:
        if not 0 < size <= config.max_batch_size:
            limit = f"max_batch_size, which is {config.max_batch_size}"
            yield f"preferred_batch_size {size} is not between 1 and {limit}"
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            yield from _find_tensor_faults(kind, tensor)
    for group in config.instance_group:
        if group.kind == ModelInstanceGroup.KIND_CPU and group.gpus:
            yield f"an instance_group of KIND_CPU names GPUs: {listed(group.gpus)}"
    yield from _find_tag_faults(config)
    yield from _find_wiring_faults(config)


def _find_tag_faults(config: ModelConfig) -> Iterator[str]:
    """Yield the keys of metric_tags that Triton could not make a label of."""
    for tag in config.metric_tags:
        if _TAG.fullmatch(tag) is None:
            yield f"metric_tags {cut(tag)!r}: a key is letters, digits and, not at its start, _"


def _find_tensor_faults(kind: str, tensor: ModelInput | ModelOutput) -> Iterator[str]:
    """Yield the faults of an input or output, which `kind` says: its name, and its sizes."""
    if not tensor.name:
        yield f"an {kind} has no name"
    name = f"{kind} {cut(tensor.name)!r}"
    for field, sizes in (("dims", tensor.dims), ("reshape", tensor.reshape.shape)):
        if any(size < 1 and size != -1 for size in sizes):
            yield f"{name}: {field} [{listed(sizes)}]: each must be 1 or more, or -1 for any size"
    both = {*tensor.dims, *tensor.reshape.shape}
    is_fixed = tensor.HasField("reshape") and tensor.dims and -1 not in both
    if is_fixed and math.prod(tensor.dims) != math.prod(tensor.reshape.shape):
        sizes = f"[{listed(tensor.dims)}] and reshape [{listed(tensor.reshape.shape)}]"
        yield f"{name}: dims {sizes} are of different size"


def _find_wiring_faults(config: ModelConfig) -> Iterator[str]:
    """Yield the faults of an ensemble; nothing for any other model."""
    steps = list(config.ensemble_scheduling.step)
    for number, step in enumerate(steps):
        for field, tensors in (("input_map", step.input_map), ("output_map", step.output_map)):
            if not tensors:
                yield f"{_name_step(number, step)} has no {field}"
    writers: dict[str, int] = {}
    for number, step in enumerate(steps):
        for tensor in step.output_map.values():
            if tensor in writers:
                yield f"{cut(tensor)!r} is in an output_map twice; one step may write it, once"
            writers[tensor] = number
    if steps:
        yield from _find_unfilled(config, steps, writers)


def _find_unfilled(
    config: ModelConfig, steps: list[ModelEnsembling.Step], writers: dict[str, int]
) -> Iterator[str]:
    """Yield the tensors of an ensemble that are read but not written, or written or declared and of
    no use, and steps that wait for each other. `writers` has the number of the step that writes a
    tensor.
    """
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    read = {tensor for step in steps for tensor in step.input_map.values()}
    for name in sorted(inputs - read - writers.keys()):
        known = quoted_list(sorted(read))
        yield f"no step reads the ensemble's input {cut(name)!r}; steps read {known}"
    for number, step in enumerate(steps):
        for tensor in sorted({*step.input_map.values()} - inputs - writers.keys()):
            yield (
                f"{_name_step(number, step)} reads {cut(tensor)!r}, which is neither an input of"
                " the ensemble nor written by a step"
            )
    for name in sorted(outputs - inputs - writers.keys()):
        known = quoted_list(sorted(writers))
        yield f"no step writes the ensemble's output {cut(name)!r}; steps write {known}"
    for name in sorted(writers.keys() - outputs - read):
        yield f"{cut(name)!r} of an output_map is neither an output of the ensemble nor read"
    needed = {
        number: {writers[t] for t in step.input_map.values() if t in writers and t not in inputs}
        for number, step in enumerate(steps)
    }
    try:
        graphlib.TopologicalSorter(needed).prepare()
    except graphlib.CycleError as error:
        circle = [steps[number].model_name for number in reversed(error.args[1])]
        yield f"steps wait for each other's outputs: {quoted_list(circle, ' -> ')}"


def _name_step(number: int, step: ModelEnsembling.Step) -> str:
    """Return how messages name a step of an ensemble, by its place and its model."""
    return f"step {number + 1}, model {cut(step.model_name)!r},"

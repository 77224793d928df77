"""Refuses configurations that Triton is certain to refuse, whatever the model file says.

Only values that are wrong in themselves: what is missing, a backend may complete from the model.
To many of these Triton only answers "failed to poll from model repository" (docs/design/triton.md).
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import (
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
)

from adapter.errors import InvalidModel
from adapter.packages.config.wiring import wiring_faults
from adapter.packages.source.contents import shown

_MAX_LISTED = 10


def refuse_impossible(config: ModelConfig, path: Path) -> None:
    """Raise InvalidModel with the first fault. `path` is the config's, for the message."""
    for fault in _faults(config):
        raise InvalidModel(f"{shown(path)}: {fault}")


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
        asked = _listed(policy.specific.versions) if kind == "specific" else "latest 0"
        raise ValueError(f"version_policy asks for {asked}; there is {', '.join(numbered)}")
    return served


def _faults(config: ModelConfig) -> Iterator[str]:
    if config.max_batch_size < 0:
        yield f"max_batch_size is {config.max_batch_size}; it must be 0, for no batching, or more"
    for size in config.dynamic_batching.preferred_batch_size:
        if not 0 < size <= config.max_batch_size:
            most = f"max_batch_size, which is {config.max_batch_size}"
            yield f"preferred_batch_size {size} is not between 1 and {most}"
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            yield from _tensor_faults(kind, tensor)
    for group in config.instance_group:
        if group.kind == ModelInstanceGroup.KIND_CPU and group.gpus:
            yield f"an instance_group of KIND_CPU names GPUs: {_listed(group.gpus)}"
    yield from wiring_faults(config)


def _tensor_faults(kind: str, tensor: ModelInput | ModelOutput) -> Iterator[str]:
    if not tensor.name:
        yield f"an {kind} has no name"
    name = f"{kind} {tensor.name[:100]!r}"
    for field, sizes in (("dims", tensor.dims), ("reshape", tensor.reshape.shape)):
        if any(size < 1 and size != -1 for size in sizes):
            yield f"{name}: {field} [{_listed(sizes)}]: each must be 1 or more, or -1 for any size"
    both = {*tensor.dims, *tensor.reshape.shape}
    is_fixed = tensor.HasField("reshape") and tensor.dims and -1 not in both
    if is_fixed and math.prod(tensor.dims) != math.prod(tensor.reshape.shape):
        sizes = f"[{_listed(tensor.dims)}] and reshape [{_listed(tensor.reshape.shape)}]"
        yield f"{name}: dims {sizes} are of different size"


def _listed(numbers: Iterable[int]) -> str:
    texts = [str(number) for number in numbers]
    more = ", ..." if len(texts) > _MAX_LISTED else ""
    return ", ".join(texts[:_MAX_LISTED]) + more

"""Finds what is wrong with the tensors between the steps of an ensemble.

Triton refuses each of these, and answers only "failed to poll from model repository".
"""

import graphlib
from collections.abc import Iterable, Iterator

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelEnsembling

_MAX_LISTED = 10


def wiring_faults(config: ModelConfig) -> Iterator[str]:
    """Yield the faults of an ensemble; nothing for any other model."""
    steps = list(config.ensemble_scheduling.step)
    for number, step in enumerate(steps):
        for field, tensors in (("input_map", step.input_map), ("output_map", step.output_map)):
            if not tensors:
                yield f"{_step(number, step)} has no {field}"
    writers: dict[str, int] = {}
    for number, step in enumerate(steps):
        for tensor in step.output_map.values():
            if tensor in writers:
                yield f"{_shown(tensor)} is in an output_map twice; one step may write it, once"
            writers[tensor] = number
    if steps:
        yield from _unfilled(config, steps, writers)


def _unfilled(
    config: ModelConfig, steps: list[ModelEnsembling.Step], writers: dict[str, int]
) -> Iterator[str]:
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    read = {tensor for step in steps for tensor in step.input_map.values()}
    for name in sorted(inputs - read - writers.keys()):
        yield f"no step reads the ensemble's input {_shown(name)}; steps read {_listed(read)}"
    for number, step in enumerate(steps):
        for tensor in sorted({*step.input_map.values()} - inputs - writers.keys()):
            yield (
                f"{_step(number, step)} reads {_shown(tensor)}, which is no input of the ensemble,"
                " and which no step writes"
            )
    for name in sorted(outputs - inputs - writers.keys()):
        yield f"no step writes the ensemble's output {_shown(name)}; steps write {_listed(writers)}"
    for name in sorted(writers.keys() - outputs - read):
        yield f"{_shown(name)} of an output_map is no output of the ensemble, and no step reads it"
    needed = {
        number: {writers[t] for t in step.input_map.values() if t in writers and t not in inputs}
        for number, step in enumerate(steps)
    }
    try:
        graphlib.TopologicalSorter(needed).prepare()
    except graphlib.CycleError as error:
        circle = [f"{steps[number].model_name[:100]!r}" for number in reversed(error.args[1])]
        yield f"steps wait for each other's outputs: {' -> '.join(circle[: _MAX_LISTED + 1])}"


def _step(number: int, step: ModelEnsembling.Step) -> str:
    return f"step {number + 1}, model {_shown(step.model_name)},"


def _shown(name: str) -> str:
    return repr(name[:100])


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    more = ", ..." if len(found) > _MAX_LISTED else ""
    return (", ".join(map(_shown, found[:_MAX_LISTED])) or "nothing") + more

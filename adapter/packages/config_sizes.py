"""Refuses configurations whose counts or sizes would end Triton, or take the machine's memory.

Triton allocates what a config asks for while it loads the model, and an allocation that fails ends
its process, with all other models. Python's integers do not overflow, as a product in Triton does.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelSequenceBatching

from adapter.packages.messages import cut, listed

# Each instance of a python model is a process, of other models at least a thread. A machine has
# fewer cores, and places for models on its GPUs.
MAX_INSTANCES = 256
# Triton makes the queues of all slots at the load. A model with 1024 slots may have 256 instances.
MAX_SEQUENCE_SLOTS = 2**18
# The states of one sequence together. Triton allocates the initial ones at the load. A state goes
# to the model and comes back with each request, as its inputs and outputs do.
MAX_STATE_BYTES = 2**31
# No inference over gRPC or HTTP has more, so no warm-up needs more.
MAX_WARMUP_BYTES = 2**31
# Triton makes as many requests as a sample's batch_size, and sends them count times. Until all are
# answered, the model is not loaded.
MAX_WARMUP_REQUESTS = 2**16

# NumPy has no array of more dimensions. A product of 50,000 takes Python many seconds, and has more
# digits than it prints.
MAX_DIMENSIONS = 64

# A string is its length, of 4 bytes, and its characters.
_WIDTHS = {
    DataType.TYPE_BOOL: 1,
    DataType.TYPE_UINT8: 1,
    DataType.TYPE_UINT16: 2,
    DataType.TYPE_UINT32: 4,
    DataType.TYPE_INT8: 1,
    DataType.TYPE_INT16: 2,
    DataType.TYPE_INT32: 4,
    DataType.TYPE_FP16: 2,
    DataType.TYPE_FP32: 4,
    DataType.TYPE_BF16: 2,
    DataType.TYPE_STRING: 4,
}
_LARGEST_WIDTH = 8


def find_size_faults(config: ModelConfig) -> Iterator[str]:
    """Yield the counts and sizes of a config that are too large, each with its field and limit."""
    for name, dims in _list_shapes(config):
        if len(dims) > MAX_DIMENSIONS:
            yield f"{name}: {len(dims)} dimensions; at most {MAX_DIMENSIONS}"
    instances = sum(
        max(1, group.count) * max(1, len(group.gpus)) for group in config.instance_group
    )
    if instances > MAX_INSTANCES:
        yield f"instance_group: {instances} instances; at most {MAX_INSTANCES}"
    if config.instance_group and all(group.passive for group in config.instance_group):
        yield "instance_group: every group is passive, so no instance would run an inference"
    if config.HasField("sequence_batching"):
        yield from _find_slot_faults(config, max(1, instances))
        yield from _find_state_faults(config.sequence_batching)
    yield from _find_warmup_faults(config)
    yield from _find_warmup_batch_faults(config)


def _list_shapes(config: ModelConfig) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield each shape in a config, with the name of what has it."""
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for tensor in tensors:
            yield f"{kind} {cut(tensor.name)!r}: dims", tensor.dims
            yield f"{kind} {cut(tensor.name)!r}: reshape", tensor.reshape.shape
    for state in config.sequence_batching.state:
        name = f"sequence_batching.state {cut(state.output_name)!r}"
        yield f"{name}: dims", state.dims
        for initial in state.initial_state:
            yield f"{name}: initial_state", initial.dims
    for sample in config.model_warmup:
        for key, given in sample.inputs.items():
            yield f"model_warmup {cut(sample.name)!r}: input {cut(key)!r}", given.dims


def _find_slot_faults(config: ModelConfig, instances: int) -> Iterator[str]:
    """Yield a fault if all instances together take too many sequences at once."""
    if config.sequence_batching.HasField("oldest"):
        field = "sequence_batching.oldest: max_candidate_sequences"
        slots = config.sequence_batching.oldest.max_candidate_sequences
    else:
        field = "sequence_batching: max_batch_size"
        slots = config.max_batch_size
    if slots * instances > MAX_SEQUENCE_SLOTS:
        total = f"{slots * instances} sequences at once in all instances"
        yield f"{field} is {slots}, so {total}; at most {MAX_SEQUENCE_SLOTS}"


def _find_state_faults(batching: ModelSequenceBatching) -> Iterator[str]:
    """Yield the states of a sequence whose sizes are negative, or too large together."""
    state_bytes = 0
    initial_bytes = 0
    for state in batching.state:
        name = f"sequence_batching.state {cut(state.output_name)!r}"
        if any(size < -1 for size in state.dims):
            yield f"{name}: dims [{listed(state.dims)}]: each must be 0 or more, or -1 for any size"
        state_bytes += _count_bytes(state.dims, state.data_type)
        for initial in state.initial_state:
            if any(size < -1 for size in initial.dims):
                dims = f"dims [{listed(initial.dims)}]"
                yield f"{name}: initial_state: {dims}: each must be 0 or more"
            initial_bytes += _count_bytes(initial.dims, initial.data_type)
    for field, size in (("state", state_bytes), ("state.initial_state", initial_bytes)):
        if size > MAX_STATE_BYTES:
            yield f"sequence_batching.{field}: {size} bytes by dims; at most {MAX_STATE_BYTES}"


def _find_warmup_faults(config: ModelConfig) -> Iterator[str]:
    """Yield the inputs of warm-up samples whose sizes are negative, and samples that make too many
    bytes or requests together.
    """
    requests = 0
    sizes = 0
    for sample in config.model_warmup:
        name = f"model_warmup {cut(sample.name)!r}"
        for key, given in sample.inputs.items():
            if any(size < 0 for size in given.dims):
                dims = f"dims [{listed(given.dims)}]"
                yield f"{name}: input {cut(key)!r}: {dims}: each must be 0 or more"
            sizes += _count_bytes(given.dims, given.data_type) * max(1, sample.batch_size)
        requests += sample.batch_size * max(1, sample.count)
    if sizes > MAX_WARMUP_BYTES:
        yield f"model_warmup: {sizes} bytes by dims and batch_size; at most {MAX_WARMUP_BYTES}"
    if requests > MAX_WARMUP_REQUESTS:
        limit = f"at most {MAX_WARMUP_REQUESTS}"
        yield f"model_warmup: {requests} requests by batch_size and count; {limit}"


def _find_warmup_batch_faults(config: ModelConfig) -> Iterator[str]:
    """Yield warm-up samples that are larger than the model's batch. Their requests fail, and that
    may end Triton 2.51.
    """
    for sample in config.model_warmup:
        if sample.batch_size > max(1, config.max_batch_size):
            name = f"model_warmup {cut(sample.name)!r}"
            limit = f"max_batch_size, which is {config.max_batch_size}"
            yield f"{name}: batch_size {sample.batch_size} is above {limit}"


def _count_bytes(dims: Iterable[int], kind: DataType) -> int:
    """Return the bytes of a tensor of this shape and type; a dimension of -1 counts as 1."""
    return math.prod(abs(size) for size in dims) * _WIDTHS.get(kind, _LARGEST_WIDTH)

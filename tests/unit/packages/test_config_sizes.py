"""Counts and sizes in a config that would end Triton, and those of ordinary models."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from adapter.errors import InvalidModel
from adapter.packages.config_sizes import (
    MAX_INSTANCES,
    MAX_SEQUENCE_SLOTS,
    MAX_STATE_BYTES,
    MAX_WARMUP_BYTES,
    MAX_WARMUP_REQUESTS,
    find_size_faults,
)
from adapter.packages.messages import refuse_faults
from tests.cases import rows

PATH = Path("m/config.pbtxt")
MANY = ", ".join([str(2**63 - 1)] * 50_000)


def groups(count: int, more: str = "") -> str:
    return f"instance_group {{ count: {count} {more} }}"


def state(dims: str, kind: str = "FP32", initial: str = "") -> str:
    given = f"initial_state {{ data_type: TYPE_{kind} dims: [{initial}] }}" if initial else ""
    own = f'output_name: "SO" data_type: TYPE_{kind} dims: [{dims}]'
    return f"sequence_batching {{ state {{ {own} {given} }} }}"


def warmup(dims: str, batch: int = 1, count: int = 0, kind: str = "FP32") -> str:
    given = f'key: "IN" value {{ data_type: TYPE_{kind} dims: [{dims}] zero_data: true }}'
    return f'model_warmup {{ name: "w" batch_size: {batch} count: {count} inputs {{ {given} }} }}'


def direct(size: int) -> str:
    return f"max_batch_size: {size} sequence_batching {{ direct {{ }} }}"


def oldest(sequences: int) -> str:
    return f"sequence_batching {{ oldest {{ max_candidate_sequences: {sequences} }} }}"


def refuse(text: str) -> None:
    refuse_faults(PATH, find_size_faults(text_format.Parse(text, ModelConfig())))


@rows(
    ("text", "fault"),
    [
        (groups(100_000), "instance_group: 100000 instances; at most 256"),
        (groups(1) * 500, "instance_group: 500 instances; at most 256"),
        (groups(100, "gpus: [0, 1, 2]"), "instance_group: 300 instances; at most 256"),
        (groups(2**31 - 1) * 9, f"instance_group: {9 * (2**31 - 1)} instances"),
        (groups(1, "passive: true"), "instance_group: every group is passive"),
        (groups(1, "passive: true") * 2, "instance_group: every group is passive"),
        (direct(2**31 - 1), "sequence_batching: max_batch_size is 2147483647, so 2147483647"),
        (direct(10_000_000), "max_batch_size is 10000000"),
        ("max_batch_size: 10000000 sequence_batching { }", "max_batch_size is 10000000"),
        (direct(2048) + groups(256), "max_batch_size is 2048, so 524288 sequences at once in all"),
        (oldest(2**31 - 1), "sequence_batching.oldest: max_candidate_sequences is 2147483647"),
        (state("1000000000000"), "sequence_batching.state: 4000000000000 bytes by dims; at most"),
        (state("1000000000000", "STRING"), "sequence_batching.state: 4000000000000 bytes"),
        (state("4294967296, 4294967296"), f"sequence_batching.state: {2**66} bytes"),
        (state("1", initial="1000000000"), "sequence_batching.state.initial_state: 4000000000 b"),
        (state("-1, 1000000000"), "sequence_batching.state: 4000000000 bytes"),
        (state("-2"), "sequence_batching.state 'SO': dims [-2]: each must be 0 or more, or -1"),
        (state("1", initial="-2"), "sequence_batching.state 'SO': initial_state: dims [-2]"),
        (warmup("1000000000"), "model_warmup: 4000000000 bytes by dims and batch_size; at most"),
        (warmup("4611686018427387904"), f"model_warmup: {2**64} bytes"),
        (warmup("2000000000", kind="STRING"), "model_warmup: 8000000000 bytes"),
        (warmup("1000000", batch=1000), "model_warmup: 4000000000 bytes"),
        (warmup("300000000") * 2, "model_warmup: 2400000000 bytes"),
        (warmup("0", batch=2**32 - 1), "model_warmup: 4294967295 requests by batch_size and count"),
        (warmup("1", count=2**32 - 1), "model_warmup: 4294967295 requests"),
        (warmup("1", count=2**31), "model_warmup: 2147483648 requests"),
        (
            warmup("1", batch=2),
            "model_warmup 'w': batch_size 2 is above max_batch_size, which is 0",
        ),
        (
            "max_batch_size: 4 " + warmup("1", batch=5),
            "batch_size 5 is above max_batch_size, which",
        ),
        (warmup("-5"), "model_warmup 'w': input 'IN': dims [-5]: each must be 0 or more"),
        (warmup(MANY), "model_warmup 'w': input 'IN': 50000 dimensions; at most 64"),
        (state(MANY), "sequence_batching.state 'SO': dims: 50000 dimensions; at most 64"),
        (state("1", initial=MANY), "'SO': initial_state: 50000 dimensions; at most 64"),
        (f'input {{ name: "a" dims: [{MANY}] }}', "input 'a': dims: 50000 dimensions; at most"),
        (
            f'output {{ name: "a" reshape {{ shape: [{MANY}] }} }}',
            "output 'a': reshape: 50000 dimensions; at most 64",
        ),
    ],
)
def test_excessive_size_is_refused_with_field_and_number(text, fault):
    with pytest.raises(InvalidModel) as caught:
        refuse(text)

    assert str(caught.value).startswith("m/config.pbtxt: ")
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "max_batch_size: 2147483647 dynamic_batching { }",  # Triton 2.51 allocates nothing for it
        groups(MAX_INSTANCES),
        groups(8, "gpus: [0, 1, 2, 3, 4, 5, 6, 7]"),
        groups(0) + groups(-7),  # Triton makes one of each
        groups(1, "passive: true") + groups(1),
        direct(1024) + groups(256),
        direct(0),
        oldest(MAX_SEQUENCE_SLOTS),
        state("-1, 32, 128"),
        state("2, 32, 4096, 128", "FP16", initial="2, 32, 4096, 128"),
        state(str(MAX_STATE_BYTES), "UINT8"),
        state("0"),
        state(", ".join(["1"] * 64)),
        "max_batch_size: 64 " + warmup("3, 1024, 1024", batch=64),
        warmup("1, 512, 512, 512"),
        "max_batch_size: 128 " + warmup("0", batch=128, count=100),
        "max_batch_size: 1 " + warmup("1", batch=1),
        warmup(str(MAX_WARMUP_BYTES), kind="BOOL"),
        warmup("1", batch=1, count=MAX_WARMUP_REQUESTS),
        warmup("4", batch=0, count=2**31),  # Triton passes a sample of no requests over
    ],
)
def test_ordinary_size_passes(text):
    refuse(text)


@pytest.mark.parametrize(
    "kind", [name for name in DataType.DESCRIPTOR.values_by_name if name != "TYPE_INVALID"]
)
def test_width_of_every_type_counts(kind):
    """A type of a newer schema counts as one of the widest."""
    widths = {"8": 1, "16": 2, "32": 4, "64": 8, "BOOL": 1, "STRING": 4}
    [width] = [width for end, width in widths.items() if kind.endswith(end)]
    name = kind.removeprefix("TYPE_")

    refuse(warmup(str(MAX_WARMUP_BYTES // width), kind=name))
    with pytest.raises(InvalidModel, match="model_warmup"):
        refuse(warmup(str(MAX_WARMUP_BYTES // width + 1), kind=name))

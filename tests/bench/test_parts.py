"""Histogram, schedule, payloads, header blocks and arguments."""

import itertools
import random
import struct

import hpack
import pytest

from adapter.tools.bench.errors import BadArguments, BenchError, needed
from adapter.tools.bench.http2 import Blocks
from adapter.tools.bench.load import arrivals
from adapter.tools.bench.payload import Shape, from_file, from_metadata, raw
from adapter.tools.bench.record import Histogram, merged, usage


def test_percentiles_are_within_a_thousandth():
    source = random.Random(7)
    values = sorted(source.lognormvariate(-6, 2) for _ in range(10_000))
    histogram = Histogram()
    for value in values:
        histogram.add(value)

    for percent in (1, 50, 90, 99, 99.9):
        exact = values[max(1, -(-int(10_000 * percent) // 100)) - 1]
        assert histogram.percentile(percent) == pytest.approx(exact, rel=0.0015, abs=2e-6)
    assert histogram.percentile(100) == pytest.approx(values[-1], rel=0.0015)
    assert histogram.largest == values[-1]


def test_an_empty_histogram_has_no_percentiles():
    assert list(Histogram().percentiles([50, 99])) == [None, None]


def test_histograms_merge_into_one_of_all_values():
    parts = [Histogram() for _ in range(3)]
    for number, part in enumerate(parts, 1):
        for _ in range(number):
            part.add(number * 0.001)

    whole = merged(parts)

    assert (whole.count, whole.largest) == (6, 0.003)
    assert whole.percentile(50) == pytest.approx(0.002, rel=0.002)


def test_constant_arrivals_do_not_drift():
    due = list(arrivals(3.0, 100.0, poisson=False, seconds=1000.0, count=None, seed=1))

    assert len(due) == 3000
    assert due[-1] == pytest.approx(100.0 + 2999 / 3, abs=1e-6)


def test_a_schedule_may_have_no_end_but_a_count():
    assert len(list(arrivals(10.0, 0.0, poisson=True, seconds=None, count=7, seed=1))) == 7


def test_the_gaps_of_poisson_arrivals_vary_as_they_should():
    due = list(arrivals(100.0, 0.0, poisson=True, seconds=None, count=20_000, seed=1))
    gaps = [b - a for a, b in itertools.pairwise(due)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5

    assert mean == pytest.approx(0.01, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(
    ("datatype", "size"),
    [("BOOL", 1), ("UINT8", 1), ("INT16", 2), ("FP16", 2), ("BF16", 2), ("INT64", 8), ("FP64", 8)],
)
def test_each_type_has_its_size(datatype, size):
    metadata = {"name": "m", "inputs": [{"name": "IN", "datatype": datatype, "shape": ["-1", "3"]}]}

    (tensor,) = from_metadata(metadata, Shape(2, {}), 1).tensors

    assert tensor.shape == (2, 3)
    assert len(raw(tensor)) == 6 * size


def test_bf16_is_the_upper_half_of_fp32():
    inputs = [{"name": "IN", "datatype": "BF16", "shape": [1], "data": [0.375]}]

    (tensor,) = from_file(f'{{"inputs": {inputs}}}'.replace("'", '"').encode()).tensors

    assert b"\0\0" + raw(tensor) == struct.pack("<f", 0.375)


def test_strings_have_their_lengths():
    text = (
        b'{"inputs": [{"name": "S", "datatype": "BYTES", "shape": [2], "data": ["a", "\xc3\xa9"]}]}'
    )

    (tensor,) = from_file(text).tensors

    assert raw(tensor) == b"\1\0\0\0a\2\0\0\0\xc3\xa9"


@pytest.mark.parametrize(
    "text",
    [
        b"no json",
        b"[]",
        b'{"inputs": 3}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [3], "data": [1]}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP8", "shape": [1], "data": [1]}]}',
        b'{"inputs": [{"name": "x", "datatype": "INT8", "shape": [1], "data": [1000]}]}',
    ],
)
def test_a_payload_that_is_no_request_is_refused(text):
    with pytest.raises(BenchError):
        from_file(text)


def test_a_shape_for_an_input_that_is_not_there_is_refused():
    metadata = {"name": "m", "inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1]}]}

    with pytest.raises(BenchError, match="has no input 'OUT'"):
        from_metadata(metadata, Shape(1, {"OUT": (1,)}), 1)


@pytest.mark.parametrize("table", [4096, 0])
@pytest.mark.parametrize("size", [None, 100, 5000])
def test_a_server_reads_the_same_headers_every_time(table, size):
    """Also one that its table has no room for."""
    given = [] if size is None else [("user-agent", "u" * size), ("x-more", "y")]
    blocks, server = Blocks(hpack, "host:1", "/service/Method", given), hpack.Decoder()
    blocks.limit(table)
    wanted = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/service/Method"),
        (":authority", "host:1"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *given,
    ]
    extra = [("mm-model-id", "m" * 300)]

    read = [list(server.decode(blocks.encode(each))) for each in ([], [], extra, [])]

    assert read == [wanted, wanted, wanted + extra, wanted]
    assert server.header_table_size == table


def test_an_answer_is_good_only_with_grpc_status_0():
    blocks, server = Blocks(hpack, "h", "/m"), hpack.Encoder()
    server.header_table_size = 0

    def failure(**fields: str) -> object:
        pairs = [(name.replace("_", "-"), value) for name, value in fields.items()]
        return blocks.decode(server.encode(pairs)).failure("200")

    assert failure(grpc_status="0") is None
    assert failure(grpc_status="5", grpc_message="a%20b").code == "NOT_FOUND"
    assert failure(grpc_status="99").code == "99"
    assert failure(other="x").code == "HTTP 200"


def test_a_library_that_is_missing_is_named_with_its_extra():
    with pytest.raises(BadArguments, match=r"no_such_library .* pip install '\.\[bench\]'"):
        needed("no_such_library")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["ftp://x:1", "--model=m"], "URL"),
        (["http://x", "--model=m"], "URL"),
        (["http://x:1/path", "--model=m"], "URL"),
        (["grpc://x:1", "--model=m", "--protocol=v2-json"], "not spoken"),
        (["grpc://x:1", "--models-from-list"], "--models-from-list"),
        (["grpc://x:1", "--model=m", "--churn=/p"], "--churn-at"),
        (["grpc://x:1", "--model=m", "--churn=/p", "--churn-at=grpc://x:1"], "HTTP URL"),
        (["grpc://x:1", "--model=m", "--streams=101"], "at most 100"),
        (["http://x:1", "--model=m", "--streams=2"], "--streams"),
        (["http://x:1", "--models=a,,b"], "empty name"),
        (["http://x:1", "--models=a,a"], "comes twice"),
        (["http://x:1", "--model=m", "--arrivals=poisson"], "--rate"),
        (["http://x:1", "--model=m", "--churn-at=http://x:1"], "needs --churn"),
        (["http://x:1", "--model=m", "--compare-protocol=grpc"], "needs --compare"),
        (["http://x:1", "--model=m", "--compare=http://y:1", "--count=3"], "a slice"),
        (["http://x:1", "--model=m", "--cpu-pid=4194305"], "no process"),
        (["http://x:1", "--model=m", "--payload=/nowhere/x"], "--payload"),
        (["http://x:1", "--model=m", "--plot=/nowhere/x.png"], "--plot"),
        (["http://x:1", "--model=m", "--plot=x.bmp"], "must end in .png, .svg, .pdf"),
        (["http://x:1", "--model=m", "--plot=x"], "must end in"),
    ],
)
def test_bad_arguments_are_named(bench, args, problem):
    bench(*args)

    assert bench.code == 2
    assert problem in "\n".join(bench.problems)


def test_all_problems_are_said_at_once(bench):
    bench("http://x", "--model=m", "--compare=y", "--metadata=z", "--cpu-pid=4194305")

    assert len(bench.problems) == 4


@pytest.mark.parametrize("flag", ["--rate=0", "--count=0", "--zipf=-1", "--shape=3", "--header=x"])
def test_a_value_that_is_none_is_refused_by_the_parser(bench, flag):
    with pytest.raises(SystemExit) as stop:
        bench("http://x:1", "--model=m", flag)
    assert stop.value.code == 2


def test_a_process_that_is_not_there_has_no_usage():
    assert usage(4194305) is None

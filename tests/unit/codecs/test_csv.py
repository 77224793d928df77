"""Tables of numbers as text: what goes in comes out, and what is no number says where it is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from adapter.codecs import csv
from adapter.codecs.csv import read_table, write_table
from tests.cases import rows

TYPES = {
    **{f"INT{8 * size}": f"<i{size}" for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": f"<u{size}" for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
tables = st.sampled_from(sorted(TYPES)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        arrays.arrays(
            TYPES[name],
            arrays.array_shapes(min_dims=2, max_dims=2),
            elements={"allow_nan": False} if name.startswith("FP") else None,
        ),
    )
)


@given(tables)
def test_table_is_same_after_it_was_text(table):
    datatype, array = table
    text = write_table(array.tobytes(), datatype, array.shape)
    assert (
        read_table(text, datatype) == (array.shape, (array + array.dtype.type(0)).tobytes())
        or (
            np.frombuffer(read_table(text, datatype)[1], array.dtype).reshape(array.shape) == array
        ).all()
    )


@pytest.mark.parametrize(
    "text",
    [
        *(b"1,2\n3,4", b"1,2\r\n3,4\r\n", b" 1, 2\n3 ,4\n\n", b'"1",2\n3,"4"'),
        *(b"1,2\r3,4\r", b"\xef\xbb\xbf1,2\r\n3,4\r\n"),  # as spreadsheets write them
    ],
)
def test_the_ways_to_write_a_table(text):
    shape, raw = read_table(text, "FP32")
    assert shape == (2, 2)
    assert np.frombuffer(raw, "<f4").tolist() == [1, 2, 3, 4]


@rows(
    ("text", "datatype", "why"),
    [
        (b"1,2\n3", "FP32", "row 2 has 1 values; row 1 has 2"),
        (b"1,2\n\n3,4", "FP32", "row 2 is empty"),
        (b"a,b\n1,2", "FP32", "row 1: 'a' is not a valid FP32; a table has no heading$"),
        (b"1,b\n1,2", "FP32", "row 1: 'b' is not a valid FP32; a table has no heading$"),
        (b"1,2\na,b", "FP32", "row 2: 'a' is not a valid FP32$"),
        (b"9" * 400, "INT64", "row 1: '9+' is out of the range of INT64"),
        (b"9" * 400, "FP64", "row 1: '9+' is out of the range of FP64"),
        (b"1,", "FP32", "row 1: '' is not a valid FP32"),
        (b"1_0", "INT32", "row 1: '1_0' is not a valid INT32"),
        (b"1.5", "INT32", "row 1: '1.5' is not a valid INT32"),
        (b"300", "UINT8", "row 1: '300' is out of the range of UINT8"),
        (b"\n1,2\n3,4", "FP32", "row 1 is empty"),
        (b"1,2\n3,3.5e38", "FP32", r"row 2: '3\.5e38' is out of the range of FP32"),
        (b"inf,-1e400", "FP64", "row 1: '-1e400' is out of the range of FP64"),
        (b"inf,70000", "FP16", "row 1: '70000' is out of the range of FP16"),
        (b"1,-1", "UINT64", "row 1: '-1' is out of the range of UINT64"),
        (b"1;2", "FP32", "row 1: '1;2' is not a valid FP32$"),
        (b"\xef\xbb\xbf1,\xc2\xa02", "FP32", "byte 5 is 0xc2"),
        (b"", "FP32", "no values"),
        (b"\n \n", "FP32", "no values"),
        (b"\xef\xbc\x91", "INT32", "byte 0"),
        (b'"1', "FP32", "row 1"),
        (b"1\x002", "FP32", "row 1"),
        (b"9" * 200_000, "FP32", "row 1"),
        (b"9" * 5000, "INT64", "row 1"),
    ],
)
def test_invalid_table_is_refused_with_its_row(text, datatype, why):
    with pytest.raises(ValueError, match=why):
        read_table(text, datatype)


def test_csv_row_is_a_line():
    raw = np.array([0.1, np.nan, -np.inf, 2], "<f4").tobytes()
    assert write_table(raw, "FP32", (4,)) == b"0.100000001\nnan\n-inf\n2\n"
    assert write_table(raw, "FP32", (2, 2)) == b"0.100000001,nan\n-inf,2\n"
    assert write_table(b"\0\1", "BOOL", (1, 2)) == b"0,1\n"


class Longest:
    """The most values that one call was given."""

    def __init__(self) -> None:
        self.values = 0

    def of(self, act):
        def measured(datatype, values):
            self.values = max(self.values, len(values))
            return act(datatype, values)

        return measured


@pytest.mark.parametrize("end", [b",", b"\n"])
def test_table_is_read_in_pieces(monkeypatch, end):
    """A call of C holds the interpreter's lock, and with it the event loop."""
    longest, count = Longest(), 100_000
    monkeypatch.setattr(csv, "pack_values", longest.of(csv.pack_values))
    shape, raw = read_table((b"1.5" + end) * count + b"1.5", "FP32")
    assert shape == ((1, count + 1) if end == b"," else (count + 1, 1))
    assert raw == np.full(count + 1, 1.5, "<f4").tobytes()
    assert 0 < longest.values < 2**14


def test_split_row_has_right_number_in_error():
    row = b",".join([b"123456"] * 5000)
    with pytest.raises(ValueError, match="row 3: 'x' is not a valid FP32"):
        read_table(b"\n".join([row, row, row[:-6] + b"x", row]), "FP32")
    with pytest.raises(ValueError, match="row 2 has 5001 values; row 1 has 5000"):
        read_table(b"\n".join([row, row + b",1", row]), "FP32")


def test_table_is_written_as_read():
    values = np.arange(20_000, dtype="<f4")
    for shape in ((20_000,), (1, 20_000), (20_000, 1), (2, 10_000), (4000, 5)):
        text = write_table(values.tobytes(), "FP32", shape)
        rows = shape if len(shape) > 1 else (*shape, 1)
        assert read_table(text, "FP32") == (rows, values.tobytes())

"""Heads of .npy files: what we read is what NumPy reads, and nothing else is read."""

import io
import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from adapter.codecs.npy import MAX_HEAD_BYTES, bytes_needed, read_head
from adapter.core.tensors import SIZES
from tests.cases import rows

DTYPES = {
    "BOOL": "|b1",
    "INT8": "|i1",
    "UINT8": "|u1",
    **{f"INT{8 * size}": f"<i{size}" for size in (2, 4, 8)},
    **{f"UINT{8 * size}": f"<u{size}" for size in (2, 4, 8)},
    **{f"FP{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}
FP32 = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"
shapes = arrays.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4)


def saved(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def framed(text: str | bytes, version: int = 1) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    length = struct.pack("<H" if version == 1 else "<I", len(raw))
    return b"\x93NUMPY" + bytes([version, 0]) + length + raw


def read(raw: bytes):
    """As a caller does: no more than is needed."""
    return read_head(raw[: bytes_needed(raw[: bytes_needed(b"")])])


@given(st.sampled_from(sorted(DTYPES)), shapes, st.sampled_from([(1, 0), (2, 0), (3, 0)]))
def test_numpys_arrays_are_read_in_each_version(datatype, shape, version):
    array = np.zeros(shape, DTYPES[datatype])
    raw = saved(array, version)
    head = read(raw)
    assert (head.datatype, head.shape, head.size) == (datatype, shape, array.nbytes)
    assert head.offset + head.size == len(raw)


@given(arrays.arrays(arrays.array_dtypes() | arrays.scalar_dtypes(), shapes))
def test_other_arrays_are_no_tensors(array):
    raw = saved(array, (3, 0)) if not array.dtype.hasobject else b"\x93NUMPY"
    try:
        head = read(raw)
    except ValueError:
        return
    back = np.load(io.BytesIO(raw))
    assert (np.dtype(DTYPES[head.datatype]), head.shape) == (back.dtype, back.shape)
    assert raw[head.offset :] == back.tobytes()


@rows(
    ("array", "why"),
    [
        (np.zeros(2, ">f4"), "little-endian"),
        (np.zeros(2, ">i8"), "little-endian"),
        (np.zeros((2, 2), order="F"), "Fortran"),
        (np.array([{}]), "pickled"),
        (np.array([b"x"]), "'|S1' is not accepted"),
        (np.array(["x"]), "'<U1' is not accepted"),
        (np.zeros(2, "c8"), "'<c8' is not accepted"),
        (np.zeros(2, "M8[s]"), "is not accepted"),
        (np.zeros(2, [("a", "<f4")]), "not that of a plain array"),
    ],
)
def test_what_cannot_be_tensor_is_refused_with_reason(array, why):
    with pytest.raises(ValueError, match=why.replace("|", r"\|")):
        read(saved(array))


@rows(
    "text",
    [
        "",
        "{}",
        "not a dict",
        "__import__('os').system('true')",
        FP32[:-1],
        FP32 + "}",
        FP32.replace("'descr'", "'other'"),
        FP32.replace("'shape'", "'descr'"),
        FP32.replace("False", "0"),
        FP32.replace("(2, 3)", "(2, -3)"),
        FP32.replace("(2, 3)", "(True, 3)"),
        FP32.replace("(2, 3)", "(2.0, 3)"),
        FP32.replace("(2, 3)", "(2 3)"),
        FP32.replace("(2, 3)", "(,)"),
        FP32.replace("(2, 3)", "(6)"),
        FP32.replace("(2, 3)", "6"),
        FP32.replace("(2, 3)", f"({2**62}, {2**62})"),
        FP32.replace("(2, 3)", f"(0, {2**62}, 4)"),
        FP32.replace("(2, 3)", f"({'9' * 5000},)"),
        FP32.replace("(2, 3)", f"({'1,' * 65})"),
        FP32.replace("(2, 3)", "(" * 4000),
        FP32.replace("(2, 3)", "-" * 4000 + "1"),
        FP32.replace("(2, 3)", "(" + "1" * 4000 + "x)"),
        FP32 + "\0",
        b"\xff" * 100,
    ],
)
@rows("version", [1, 2, 3])
def test_a_head_that_is_none_is_refused(text, version):
    with pytest.raises(ValueError, match=r"."):
        read(framed(text, version))


def test_other_writers_may_order_and_quote_freely():
    text = '{"shape": (2L, 3L), "fortran_order": False,\n "descr": "<f4"}'
    assert (read(framed(text)).datatype, read(framed(text)).shape) == ("FP32", (2, 3))


@given(st.integers(0, 127))
def test_a_head_that_is_cut_is_refused(size):
    with pytest.raises(ValueError, match=r"."):
        read_head(saved(np.zeros((2, 3), "f4"))[:size])


def test_npy_head_too_large_is_not_read():
    start = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1)
    with pytest.raises(ValueError, match=f"at most {MAX_HEAD_BYTES}"):
        bytes_needed(start)


def test_versions_that_there_are_not_are_refused():
    for version in ((0, 0), (1, 1), (4, 0), (255, 0)):
        with pytest.raises(ValueError, match="version"):
            bytes_needed(b"\x93NUMPY" + bytes(version) + bytes(4))


@given(st.binary(max_size=200), st.integers(0, 200))
@example(b"", 0)
def test_numpy_reads_every_accepted_head(noise, at):
    whole = saved(np.zeros((2, 3), "f4"))
    raw = whole[:at] + noise + whole[at + len(noise) :]
    try:
        head = read(raw)
    except ValueError:
        return
    file = io.BytesIO(raw[: head.offset] + bytes(head.size))
    back = np.load(file)
    assert (back.dtype.itemsize, back.shape) == (SIZES[head.datatype], head.shape)

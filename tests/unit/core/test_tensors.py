"""Numbers of one data type as those of another: as by NumPy's astype, and in range."""

from random import Random

import numpy as np
import pytest

from adapter.codecs.npy import cast
from adapter.core.tensors import CODES, can_cast
from tests.cases import rows

TYPES = {
    name: f"<{'iuf'['IUF'.index(name[0])]}{size}"
    for name, size in [
        *((f"INT{8 * size}", size) for size in (1, 2, 4, 8)),
        *((f"UINT{8 * size}", size) for size in (1, 2, 4, 8)),
        *((f"FP{8 * size}", size) for size in (2, 4, 8)),
    ]
}
PAIRS = [(source, target) for source in CODES for target in CODES if can_cast(source, target)]


def test_all_numbers_become_others_but_floating_ones_integers():
    assert {source for source, _ in PAIRS} == {target for _, target in PAIRS} == set(TYPES)
    assert not can_cast("FP16", "INT64")
    assert not can_cast("BOOL", "INT8")
    assert not can_cast("FP32", "BYTES")
    assert len(PAIRS) == 11 * 3 + 8 * 8


def numbers_of(datatype):
    """Those at the ends of every range, or any bits of a floating one."""
    kind = np.dtype(TYPES[datatype])
    if kind.kind == "f":
        odd = [0, -0.0, 1, -1, np.nan, np.inf, -np.inf, np.finfo(kind).max, np.finfo(kind).tiny]
        some = np.frombuffer(Random(datatype).randbytes(100 * kind.itemsize), kind)
        return np.concatenate([np.array(odd, kind), some])
    least, most = np.iinfo(kind).min, np.iinfo(kind).max
    near = {0, *(each for k in range(64) for each in (2**k - 1, 2**k, -(2**k), -(2**k) - 1))}
    return np.array(sorted(each for each in near if least <= each <= most), kind)


@rows("source", TYPES)
def test_value_is_numpys_or_out_of_range(source):
    array = numbers_of(source)
    for target in (target for one, target in PAIRS if one == source):
        with np.errstate(all="ignore"):
            expected = array.astype(TYPES[target])
        is_float = target.startswith("FP")
        fits = np.array(
            [is_float or int(a) == int(b) for a, b in zip(array, expected, strict=True)]
        )
        found = np.frombuffer(cast(array[fits].tobytes(), source, target), TYPES[target])
        assert np.array_equal(found, expected[fits], equal_nan=is_float), target
        for odd in array[~fits]:
            with pytest.raises(ValueError, match="is out of the range") as raised:
                cast(np.array([array[fits][0], odd, odd]).tobytes(), source, target)
            assert str(raised.value) == f"{odd} is out of the range of {target}"

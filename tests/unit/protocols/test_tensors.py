"""Numbers of one data type as those of another, held to NumPy's own astype."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from adapter.protocols.tensors import CODES, cast, may_cast

TYPES = {
    name: f"<{'iuf'['IUF'.index(name[0])]}{size}"
    for name, size in [
        *((f"INT{8 * size}", size) for size in (1, 2, 4, 8)),
        *((f"UINT{8 * size}", size) for size in (1, 2, 4, 8)),
        *((f"FP{8 * size}", size) for size in (2, 4, 8)),
    ]
}
PAIRS = [(source, target) for source in CODES for target in CODES if may_cast(source, target)]


def test_all_numbers_become_others_but_floating_ones_integers():
    assert {source for source, _ in PAIRS} == {target for _, target in PAIRS} == set(TYPES)
    assert not may_cast("FP16", "INT64")
    assert not may_cast("BOOL", "INT8")
    assert not may_cast("FP32", "BYTES")
    assert len(PAIRS) == 11 * 3 + 8 * 8


@pytest.mark.parametrize(("source", "target"), PAIRS)
@given(data=st.data())
@settings(max_examples=settings().max_examples // 5)
def test_a_value_is_what_numpy_makes_of_it_or_out_of_range(source, target, data):
    array = data.draw(arrays.arrays(TYPES[source], st.integers(0, 5)))
    with np.errstate(all="ignore"):
        expected = array.astype(TYPES[target])
    if target.startswith("FP") or [int(v) for v in expected] == [int(v) for v in array]:
        found = np.frombuffer(cast(array.tobytes(), source, target), TYPES[target])
        assert np.array_equal(found, expected, equal_nan=target.startswith("FP"))
        return
    first = next(v for v, is_ in zip(array, expected, strict=True) if int(v) != int(is_))
    with pytest.raises(ValueError, match=f"^{first} is out of the range of {target}$"):
        cast(array.tobytes(), source, target)

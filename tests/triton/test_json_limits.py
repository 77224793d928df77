"""How deep JSON goes and how large its shapes are, wherever it is cut and however it hides."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Coroutine
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter.errors import InvalidRequest, PayloadTooLarge
from adapter.runtime.turns import Turns
from adapter.triton import json_limits
from adapter.triton.checked_bodies import check_in_turns, checked, is_packed, json_bytes
from adapter.triton.json_limits import (
    MOST_LEVELS,
    MOST_MEMBERS,
    Shapes,
    Structure,
    check_whole,
)
from tests.cases import rows

MIB = 2**20
INFER = "/models/m/infer"
DEEP = b"[" * (MOST_LEVELS + 1)


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


def cut(text: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted({min(place, len(text)) for place in cuts}), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def is_refused(pieces: list[bytes], limit: Structure | Shapes | None = None) -> bool:
    limit = limit or Structure()
    try:
        for piece in pieces:
            limit.feed(piece)
    except InvalidRequest:
        return True
    return False


texts = st.text(alphabet='[]{}"\\,x\n')
values = st.recursive(
    texts | st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
)


@given(values, st.integers(0, 6), st.lists(st.integers(0, 200)))
def test_too_deep_json_is_refused_exactly(value, most, cuts):
    before, json_limits.MOST_LEVELS = json_limits.MOST_LEVELS, most
    try:
        pieces = cut(json.dumps(value).encode(), cuts)
        assert is_refused(pieces) == (depth_of(value) > most)
    finally:
        json_limits.MOST_LEVELS = before


def test_many_brackets_side_by_side_are_no_depth():
    assert not is_refused([b"[" + b"[[1,2],[3]]," * 100_000, b"[]]"])
    assert not is_refused([b'["' + DEEP, DEEP + b'"]'])


def members(count: int) -> bytes:
    return b",".join(b'"p%d":1' % i for i in range(count))


TOO_MANY_PARAMETERS = [
    b'{"parameters":{%b},"inputs":[]}' % members(MOST_MEMBERS + 1),
    b'{"inputs":[{"name":"x"}],"p\\u0061rameters" : {%b}}' % members(MOST_MEMBERS + 1),
    b"{%b}" % members(MOST_MEMBERS + 1),
    b'{"parameters":{%b},%b}' % (members(500), members(500)),
    b'{"parameters":{%b}%b}' % (members(400), b',"parameters":{}' * 400),
    b'{"parameters":{"}]":1,%b}}' % members(MOST_MEMBERS),
]


def members_of(value: object) -> int:
    if not isinstance(value, dict):
        return 0
    objects = [inner for inner in value.values() if isinstance(inner, dict)]
    return len(value) + sum(100 + len(inner) for inner in objects)


@given(st.dictionaries(texts, values), st.integers(0, 400), st.lists(st.integers(0, 200)))
def test_members_of_request_and_its_objects_count(value, most, cuts):
    before, json_limits.MOST_MEMBERS = json_limits.MOST_MEMBERS, most
    try:
        pieces = cut(json.dumps(value).encode(), cuts)
        assert is_refused(pieces) == (members_of(value) > most)
    finally:
        json_limits.MOST_MEMBERS = before


@rows("text", TOO_MANY_PARAMETERS)
async def test_too_many_parameters_are_refused_everywhere(text):
    with pytest.raises(InvalidRequest, match="parameters"):
        check_whole(MIB, text, None)
    with pytest.raises(InvalidRequest, match="parameters"):
        await check_in_turns(text, None, MIB, Turns())
    with pytest.raises(InvalidRequest, match="parameters"):
        await check_packed(gzip.compress(text), {"Content-Encoding": "gzip"}, MIB)


@rows(
    "text",
    [
        b'{"parameters":{%b},"inputs":[]}' % members(MOST_MEMBERS - 200),
        b'{"inputs":[%b{}]}'
        % (b'{"name":"a","shape":[1],"data":[1],"parameters":{"b":1}},' * 2000),
        b'{"inputs":[{"parameters":{%b}}]}' % members(MOST_MEMBERS * 10),
        b'{"inputs":[{"data":["%b"]}]}' % (b":{" * 10_000),
    ],
)
@rows("size", [7, 10**6])
def test_many_inputs_parameters_and_strings_are_accepted(text, size):
    assert not is_refused([text[at : at + size] for at in range(0, len(text), size)])
    check_whole(MIB, text, None)


def test_tensors_behind_the_json_are_not_looked_at():
    check_whole(MIB, b"{}" + DEEP, 2)
    with pytest.raises(InvalidRequest):
        check_whole(MIB, b"{}" + DEEP, None)


def test_contradictory_json_length_hides_nothing():
    path, headers = INFER, {"inference-header-Content-Length": "2"}
    assert json_bytes(path, headers) == 2
    assert json_bytes(path, headers | {"Inference-Header-Content-Length": "5000"}) == 5000
    assert json_bytes(path, {"Inference-Header-Content-Length": "-1"}) is None
    assert json_bytes(path, {"Inference-Header-Content-Length": "1" * 5000}) is None


async def in_pieces(data: bytes, size: int = 10):
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def check_packed(body: bytes, headers: dict[str, str], most: int) -> None:
    async for _ in checked(in_pieces(body, len(body)), INFER, headers, most, Turns()):
        pass


async def passed(packed: bytes, headers: dict[str, str]) -> bytes:
    """What of a stream goes on to Triton; it has to be all or, where it is refused, not all."""
    seen = b""
    try:
        async for piece in checked(in_pieces(packed), INFER, headers, MIB, Turns()):
            seen += piece
    except (InvalidRequest, PayloadTooLarge):
        assert len(seen) < len(packed)
        raise
    return seen


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("DEFLATE", zlib.compress)])
async def test_compressed_bodies_are_looked_into(coding, pack):
    headers = {"content-encoding": coding}
    assert is_packed(headers)
    await check_packed(pack(b"{}"), headers, MIB)
    packed = pack(b"[1]" * 1000)
    assert await passed(packed, headers) == packed
    for body, error in ((DEEP, InvalidRequest), (bytes(MIB + 1), PayloadTooLarge)):
        with pytest.raises(error):
            await check_packed(pack(body), headers, MIB)
        with pytest.raises(error):
            await passed(pack(body), headers)


PACKED = gzip.compress(b'{"inputs":[1]}' * 100)


async def with_turns(work: Coroutine[None, None, None], least: int) -> None:
    """Others have at least so many turns meanwhile."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    await work
    beside.cancel()
    assert turns >= least


async def test_unpacking_a_body_lets_others_run():
    packed = gzip.compress(bytes(8 * MIB))
    await with_turns(check_packed(packed, {"Content-Encoding": "gzip"}, 8 * MIB), 20)


SHAPES = [
    (b'{"inputs":[{"shape":[2,3]}]}', 6),
    (b'{"shape" \n:\t[ 100 ,\r\n 100 ]}', 10_000),
    (b'{"\\u0073h\\u0061pe":[9]}', 9),
    (b'{"shape":[-7]}', 7),
    (b'{"shape":[3],"x":{"shape":[2]}}', 3),
    (b'{"shape":[0,1000000]}', 0),
    (b'["shape",[1000]]', 0),
    (b'{"data":["\\"shape\\":[1000]"]}', 0),
    (b'{"shape":"[1000]","shape":[]}', 1),
]


@rows(("text", "values"), SHAPES)
@rows("size", [1, 3, 1000])
def test_shape_may_have_all_values_that_fit(text, values, size):
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert not is_refused(pieces, Shapes(values))
    if values > 1:
        assert is_refused(pieces, Shapes(values - 1))


@rows("dimensions", [b"9" * 30, b"8589934592", b"65536,65536", b"-9,99999999"])
@rows("key", [b"shape", rb"\u0073hape", rb"sh\u0061p\u0065"])
async def test_shape_no_body_can_fill_is_refused(dimensions, key):
    with pytest.raises(InvalidRequest):
        check_whole(MIB, b'{"%s":[%s],"data":[1]}' % (key, dimensions), None)
    packed = gzip.compress(b'{"%s":[%s]}' % (key, dimensions))
    with pytest.raises(InvalidRequest):
        await check_packed(packed, {"Content-Encoding": "gzip"}, 99)


def test_shared_memory_tensors_may_exceed_the_body():
    text = b'{"shape":[9999],"parameters":{"shared_memory_region":"a"}}'
    check_whole(MIB, text, None)
    with pytest.raises(InvalidRequest):
        check_whole(9998, text, None)


def test_shapes_beyond_a_requests_bytes_are_refused():
    assert not is_refused([b'{"shape":[1]},' * 5000], Shapes(1))
    assert is_refused([b'{"shape":[1]},' * 1000] * 7, Shapes(1))
    assert is_refused([b'{"shape":[' + b"1," * 40_000 + b"1]}"], Shapes(1))


@pytest.mark.parametrize("text", [b'"\\"' + b'","' * MIB, b"[[" + b'{"shape":1},' * (MIB // 8)])
async def test_checking_a_large_body_lets_others_run(text):
    """Also while it is a piece of a stream."""
    async with asyncio.timeout(60):
        await with_turns(check_in_turns(text, None, MIB, Turns()), len(text) // 2**17)
        await with_turns(check_piece(text, Turns()), len(text) // 2**17)


async def test_slow_bodies_are_checked_one_a_turn():
    """So that a turn takes no longer where there are more of them."""
    turns, text = Turns(), b"[]," * (MIB // 3)

    async def check_all() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(check_piece(text, turns))

    await with_turns(check_all(), 40)


async def check_piece(text: bytes, turns: Turns) -> None:
    async for _ in checked(in_pieces(text, len(text)), INFER, {}, MIB, turns):
        pass


def test_endless_shape_is_refused_before_it_costs():
    assert is_refused([b'{"shape":'] + [b" " * 1000] * 100, Shapes(1))
    assert not is_refused([b'{"shape":[1],'] + [b" " * 1000] * 100, Shapes(1))


@pytest.mark.timeout(20)
def test_time_grows_with_the_text_and_no_faster():
    """Of many keys without a shape behind them, which an end far away would belong to; and of a
    string without an end, in which each escaped quote might begin another.
    """
    assert not is_refused([b'["' + b'\\"' * (MIB // 2)])
    check_whole(MIB, b"[" + b'"shape",' * (MIB // 32) + b"1]", None)
    check_whole(MIB, b"[[[" + b'"shape":1,' * (MIB // 32) + b"1]", None)
    assert not is_refused([b'"shape",' * 1000] * 100, Shapes(1))


_PARTS = st.sampled_from(
    [
        *(
            b'"shape"',
            b'"shape":[',
            b'"shape" : [ ',
            b'"shape":7',
            b"7,",
            b"999]",
            b"9" * 70 + b"]",
        ),
        *(b'"shape":[999]', b'"shape":[1]'),
        *(b":", b" ", b"[", b"]", b"{", b'"', b",", b"-5", b"x"),
    ]
)


@given(st.lists(_PARTS, max_size=14).map(b"".join))
def test_quick_check_of_shapes_overlooks_none(text):
    def refused(check):
        try:
            check()
        except InvalidRequest:
            return True
        return False

    most = len(text)
    assert refused(lambda: check_whole(most, text, None)) == refused(
        lambda: Shapes(most).feed(text)
    )

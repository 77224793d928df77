"""What gzip files hold, read in large pieces."""

import gzip
import io
import os

import pytest

from adapter.packages.archive import Gunzip, inflating

MIB = 2**20
RANDOM = os.urandom(3 * MIB)
PACKED = gzip.compress(RANDOM, 1)


def unpacked(packed: bytes) -> bytes:
    return Gunzip(io.BytesIO(packed)).readall()


@pytest.mark.parametrize(
    "data", [b"", b"x", RANDOM, bytes(8 * MIB), RANDOM[:MIB] + bytes(MIB) + RANDOM[MIB:]]
)
def test_what_was_packed_is_read(data):
    assert unpacked(gzip.compress(data, 1)) == data


@pytest.mark.parametrize("between", [b"", bytes(1), bytes(MIB)])
def test_members_that_are_strung_together_are_one(between):
    members = [gzip.compress(b"a"), gzip.compress(b""), PACKED, gzip.compress(b"c")]
    assert unpacked(between.join([*members, b""])) == b"a" + RANDOM + b"c"


@pytest.mark.parametrize("end", [1, 9, 10, 17, 2 * MIB, -1, -8])
def test_one_that_breaks_off_is_an_error(end):
    with pytest.raises(EOFError):
        unpacked(PACKED[:end])


@pytest.mark.parametrize("damage", ["in front", "behind", "checksum", "length"])
def test_damage_is_an_error(damage):
    packed = bytearray(gzip.compress(b"weights"))
    match damage:
        case "in front":
            packed[0] ^= 1
        case "behind":
            packed += b"x"
        case "checksum":
            packed[-8] ^= 1
        case "length":
            packed[-1] ^= 1
    with pytest.raises((inflating.error, EOFError)):
        unpacked(bytes(packed))


def test_weights_that_hardly_pack_come_in_large_pieces():
    reader = Gunzip(io.BytesIO(PACKED))
    pieces = []
    while count := reader.readinto(bytearray(MIB)):
        pieces.append(count)
    assert len(pieces) <= len(RANDOM) / MIB * 5


def test_unpacking_stays_within_the_room():
    reader = Gunzip(io.BytesIO(gzip.compress(bytes(4 * MIB))))
    assert 0 < reader.readinto(bytearray(100)) <= 100

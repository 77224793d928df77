"""A chunked body has one reading: what might be read otherwise is refused.

How others read chunks, in any cut, is compared in test_readings.py.
"""

import pytest

from adapter.frontends.http.chunks import ChunkDecoder, MalformedChunks


def decode(*pieces: bytes) -> None:
    decoder = ChunkDecoder()
    for piece in pieces:
        decoder.feed(piece)


def test_size_line_without_end_is_refused():
    with pytest.raises(MalformedChunks):
        decode(b"2;", *[b"a" * 100] * 100)


@pytest.mark.parametrize("name", [b"Content-Length", b"transfer-encoding", b"HOST"])
def test_trailer_that_frames_a_request_is_refused(name: bytes):
    with pytest.raises(MalformedChunks):
        decode(b"2\r\n{}\r\n0\r\n" + name + b": 9\r\n\r\n")


@pytest.mark.parametrize("size", [b"8000000000000000", b"ffffffffffffffff", b"0" * 17])
def test_size_beyond_63_bits_is_refused(size: bytes):
    with pytest.raises(MalformedChunks):
        decode(size + b"\r\n")

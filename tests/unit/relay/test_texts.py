"""Texts of gRPC errors in HTTP/2 headers, which are percent-encoded and of bounded length."""

import pytest

from adapter.relay.headers import (
    MAX_TEXT_BYTES,
    HeaderBlockCache,
    HeaderReader,
    status_block,
)
from adapter.relay.policy import read_answer

FAILED = (b":status", b"200"), (b"grpc-status", b"13")


def told(text: str) -> bytes:
    block = status_block(13, text, alone=True)
    return dict(HeaderReader(HeaderBlockCache(dict), 2**23).read(block))[b"grpc-message"]


def test_a_text_is_cut_before_it_is_encoded() -> None:
    assert told("x" * (MAX_TEXT_BYTES + 1)) == b"x" * MAX_TEXT_BYTES
    assert told("é" * MAX_TEXT_BYTES) == b"%C3%A9" * (MAX_TEXT_BYTES // 2)


def test_tritons_text_is_cut_before_decoding() -> None:
    encoded = b"%41" * MAX_TEXT_BYTES
    answer = read_answer((*FAILED, (b"grpc-message", encoded)))
    assert answer.text.removesuffix("%4") == "A" * (MAX_TEXT_BYTES // 3)


@pytest.mark.parametrize("text", [bytes(range(128)).decode(), "100 % é 漢 \U0001f600", ""])
def test_unprintable_characters_are_encoded_and_back(text: str) -> None:
    found = told(text)
    assert all(0x20 <= byte < 0x7F for byte in found)
    assert found.count(b"%") == sum(
        byte < 0x20 or byte >= 0x7F or byte == 0x25 for byte in text.encode()
    )
    assert read_answer((*FAILED, (b"grpc-message", found))).text == text

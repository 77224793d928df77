"""What callers can fill has a bound: each is filled beyond it here, where no other test does."""

import pytest

from adapter.relay.headers import HeaderBlockCache, HeaderReader, encoded
from adapter.telemetry.log import ids_of_headers

MANY = 10_100


def test_header_blocks_and_fields_over_grpc():
    caches = HeaderBlockCache(len)
    reader = HeaderReader(caches, 2**15)
    reader.expect_size_update()
    reader.read(b"\x20")  # the table is gone
    for number in range(MANY):
        reader.read(encoded([(b"name", b"%d" % number)]))
    long = encoded([(b"name", b"x" * 5000)])
    reader.read(long)
    assert 0 < len(caches.blocks) <= 512
    assert 0 < len(caches.fields) <= 512
    assert long not in caches.blocks
    assert long not in caches.fields


@pytest.mark.parametrize("header", ["x-request-id", "x-amzn-sagemaker-custom-attributes"])
def test_what_callers_header_may_put_into_log(header):
    (found,) = ids_of_headers({header: "r" * 50_000}).values()
    assert len(found) == 1024

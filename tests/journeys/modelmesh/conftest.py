"""A bucket for what leaves ModelMesh."""

from collections.abc import Iterator

import pytest

from tests.buckets import Bucket, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(server, request) -> Bucket:
    return Bucket(server, f"models-{abs(hash(request.node.name))}")

"""Servers that answer, and the command."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.servers import Bench, GrpcServer, HttpServer


@pytest.fixture
def server() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.close()


@pytest.fixture
def other_server() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.close()


@pytest.fixture
def grpc_server() -> Iterator[GrpcServer]:
    server = GrpcServer()
    yield server
    server.close()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)

"""Three machines on one bucket, and an Envoy in front of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.buckets import Bucket, s3_server
from tests.fleet.envoy import RunningEnvoy, running_envoy
from tests.fleet.machines import Machine, machines, room_for
from tests.running import Client


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def bucket(s3: str) -> Bucket:
    return Bucket(s3, "fleet")


@pytest.fixture(scope="module")
def shared_fleet(
    bucket: Bucket, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Machine]]:
    with machines(3, bucket, tmp_path_factory.mktemp("fleet"), *room_for(8)) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared_fleet: list[Machine]) -> list[Machine]:
    """All of them up, also what another test has ended."""
    for each in shared_fleet:
        if not each.is_up:
            each.start()
    return shared_fleet


@pytest.fixture(scope="module")
def shared_envoy(shared_fleet: list[Machine]) -> Iterator[RunningEnvoy]:
    with running_envoy(shared_fleet) as envoy:
        yield envoy


@pytest.fixture
def envoy(shared_envoy: RunningEnvoy, fleet: list[Machine]) -> RunningEnvoy:
    """It sends to all of them."""
    shared_envoy.wait_for(*fleet)
    return shared_envoy


@pytest.fixture
def client(envoy: RunningEnvoy) -> Iterator[Client]:
    client = envoy.client()
    yield client
    client.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where packages are written before they are put into the bucket."""
    return tmp_path

"""The profile `load` of compose.yaml: Locust plays the scenarios against the adapter."""

import json

import pytest
from docker import DockerClient

from tests.e2e.stack import Stack

HOSTS = {
    "sagemaker": "http://adapter:8080",
    "v2_rest": "http://adapter:8080",
    "v2_grpc": "grpc://adapter:8085",
    "loads": "http://adapter:8080",
}


@pytest.fixture(scope="module", autouse=True)
def load_image(engine: DockerClient, images: dict[str, str]) -> None:
    """Build the image first: `compose run` would mix the output of a build into the results."""
    Stack(engine, images, profile="load").compose("build")


@pytest.mark.parametrize("scenario", list(HOSTS))
def test_load_profile_calls_the_adapter_without_failure(stack: Stack, scenario: str) -> None:
    output = stack.compose(
        "run",
        "--rm",
        "load",
        f"--locustfile={scenario}.py",
        f"--host={HOSTS[scenario]}",
        "--headless",
        "--only-summary",
        "--json",
        "--users=4",
        "--run-time=5s",
    )
    requests = json.loads(output)
    assert sum(each["num_requests"] for each in requests) > 0
    assert sum(each["num_failures"] for each in requests) == 0

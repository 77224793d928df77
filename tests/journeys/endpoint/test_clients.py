"""AWS's clients, unchanged and each in an environment of its own, call models of a bucket.

The environments are made of the package registry the first time, and kept in pytest's cache.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.constants import STAY, STORE
from tests.journeys.endpoint.conftest import KEYS
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter
from tests.trees import CONFIG, infer_body, write_python_model

pytestmark = [pytest.mark.triton, pytest.mark.nightly, pytest.mark.timeout(1200)]

MEMORY = 'parameters { key: "memory_bytes" value { string_value: "100MiB" } }'
BODY = json.dumps(infer_body(0.0))
CLIENTS = ("boto3", "aiobotocore", "sagemaker", "cli")

# What each client calls, and what it is told: where the model was and what it has added, or code,
# status and OriginalStatusCode. There is room for two models, so that the third evicts the first.
PLAN: tuple[tuple[str, str, list[object]], ...] = (
    ("any", "a.tar.gz", ["miss", 1.0]),
    *(("any", "a.tar.gz", ["hit", 1.0]),) * 4,
    ("any", "b", ["miss", 2.0]),
    ("any", "c.tar.gz", ["miss", 3.0]),
    ("any", "b", ["disk", 2.0]),
    ("any", "none.tar.gz", ["ValidationError", 400, None]),
    ("any", "bad", ["ModelError", 424, 500]),
    ("gone", "a.tar.gz", ["ServiceUnavailable", 503, None]),
)

GIVEN = """
import json
from botocore.exceptions import ClientError

def answered(headers, body):
    return [headers["x-triton-adapter-cache"], json.loads(body)["outputs"][0]["data"][0]]

def failed(error):
    found, meta = error.response, error.response["ResponseMetadata"]
    status = meta["HTTPStatusCode"]
    return [found["Error"]["Code"], status, found.get("OriginalStatusCode")], meta["RetryAttempts"]
"""

BOTO3 = """
import boto3
runtime = boto3.client("sagemaker-runtime")

def call(endpoint, target):
    try:
        answer = runtime.invoke_endpoint(
            EndpointName=endpoint, TargetModel=target, ContentType="application/json", Body=BODY
        )
    except ClientError as error:
        return failed(error)
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    return answered(headers, answer["Body"].read()), answer["ResponseMetadata"]["RetryAttempts"]

for endpoint, target in PLAN:
    print(json.dumps(call(endpoint, target)))
stream = runtime.invoke_endpoint_with_response_stream(
    EndpointName="any", InferenceComponentName=PLAN[0][1], Body=BODY
)
print("".join(event["PayloadPart"]["Bytes"].decode() for event in stream["Body"]), end="")
"""

AIOBOTOCORE = """
import asyncio
from aiobotocore.session import get_session

async def call(runtime, endpoint, target):
    try:
        answer = await runtime.invoke_endpoint(
            EndpointName=endpoint, TargetModel=target, ContentType="application/json", Body=BODY
        )
    except ClientError as error:
        return failed(error)
    async with answer["Body"] as body:
        meta = answer["ResponseMetadata"]
        return answered(meta["HTTPHeaders"], await body.read()), meta["RetryAttempts"]

async def main():
    async with get_session().create_client("sagemaker-runtime") as runtime:
        for endpoint, target in PLAN:
            print(json.dumps(await call(runtime, endpoint, target)))
        stream = await runtime.invoke_endpoint_with_response_stream(
            EndpointName="any", InferenceComponentName=PLAN[0][1], Body=BODY
        )
        async for event in stream["Body"]:
            print(event["PayloadPart"]["Bytes"].decode(), end="")

asyncio.run(main())
"""

SAGEMAKER = """
import boto3
from sagemaker.deserializers import JSONDeserializer
from sagemaker.predictor import Predictor
from sagemaker.serializers import JSONSerializer
from sagemaker.session import Session

boto = boto3.Session()
runtime = boto.client("sagemaker-runtime")
seen = []
runtime.meta.events.register(  # the predictor gives the body alone
    "after-call.sagemaker-runtime.InvokeEndpoint",
    lambda http_response, **_: seen.append(http_response.headers),
)
session = Session(boto_session=boto, sagemaker_runtime_client=runtime)

def predictor(endpoint):
    return Predictor(
        endpoint, session, serializer=JSONSerializer(), deserializer=JSONDeserializer()
    )

def call(endpoint, target):
    try:
        answer = predictor(endpoint).predict(json.loads(BODY), target_model=target)
    except ClientError as error:
        return failed(error)
    return answered(seen[-1], json.dumps(answer)), 0

for endpoint, target in PLAN:
    print(json.dumps(call(endpoint, target)))
parts = predictor("any").predict_stream(json.loads(BODY), component_name=PLAN[0][1])
print(json.dumps(json.loads(b"".join(bytes(part) for part in parts))))
"""

Environment = Callable[..., Path]


@pytest.fixture(scope="module")
def environment_of(request) -> Environment:
    def make(*requirements: str) -> Path:
        """Return the folder of its commands."""
        assert request.config.cache is not None
        folder = Path(request.config.cache.mkdir("clients-" + "-".join(requirements)))
        if not (folder / "made").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            command = [folder / "bin" / "python", "-m", "pip", "install", "-q", *requirements]
            subprocess.run(command, check=True)
            (folder / "made").touch()
        return folder / "bin"

    return make


@pytest.fixture(scope="module")
def small(bucket, tmp_path_factory) -> Iterator[RunningAdapter]:
    """Room for two models; each client has its own in the bucket. The store `gone` is not there."""
    folder = tmp_path_factory.mktemp("small")
    for client in CLIENTS:
        for number, name in enumerate(("a.tar.gz", "b", "c.tar.gz"), 1):
            model = write_python_model(
                folder / client / name, config=CONFIG + MEMORY, answer=f"values = values + {number}"
            )
            bucket.put_model(f"{client}/{name}", model)
        bad = write_python_model(
            folder / client / "bad", config=CONFIG + MEMORY, answer="raise RuntimeError('so it is')"
        )
        bucket.put_model(f"{client}/bad", bad)
    stores = {"any": f"s3://{bucket.name}/models", "gone": "http://127.0.0.1:1"}
    settings = {
        "endpoints": {name: {"models": url} for name, url in stores.items()},
        "cache_dir": str(folder / "cache"),
        "memory_source": "off",
        "memory_limit": "250MiB",
    }
    (config := folder / "adapter.yaml").write_text(json.dumps(settings))
    flags = (f"--config={config}", COMPLETE)
    quick = {STORE: 1, STAY: 0}
    with embedded_adapter(*flags, environ=bucket.environ, constants=quick) as adapter:
        yield adapter


def run(adapter: RunningAdapter, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it where it finds the endpoint as any of AWS's clients does."""
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": f"http://{adapter.http}",
        "AWS_DEFAULT_REGION": "eu-west-1",
        **{name.upper(): value for name, value in KEYS.items()},
    }
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=300, check=False
    )


def check_retries(expected: list[object], retries: int) -> None:
    """Only what is unavailable for now is sent again."""
    assert (retries > 0) == (expected[0] == "ServiceUnavailable")


@pytest.mark.parametrize(
    ("client", "requirements", "program"),
    [
        ("boto3", ("boto3",), BOTO3),
        ("aiobotocore", ("aiobotocore",), AIOBOTOCORE),
        ("sagemaker", ("sagemaker<3",), SAGEMAKER),
    ],
    ids=["boto3", "aiobotocore", "sagemaker"],
)
def test_python_client_gets_answers_streams_and_errors(
    small, environment_of, client, requirements, program
):
    plan = [(endpoint, f"{client}/{name}") for endpoint, name, _ in PLAN]
    given = f"PLAN, BODY = {plan!r}, {BODY!r}\n"
    done = run(small, environment_of(*requirements) / "python", "-c", given + GIVEN + program)
    assert done.returncode == 0, done.stderr
    # the SDK says on stdout where it looked for its configuration
    lines = [json.loads(line) for line in done.stdout.splitlines() if line[:1] in {"{", "["}]
    *told, streamed = lines
    assert [each for each, _ in told] == [expected for _, _, expected in PLAN]
    for (_, retries), (_, _, expected) in zip(told, PLAN, strict=True):
        check_retries(expected, retries)
    assert (streamed["model_name"], streamed["outputs"][0]["data"]) == (f"any/{plan[0][1]}", [1.0])


def test_aws_command_line_gets_answers_and_errors(small, environment_of, tmp_path):
    body, out = tmp_path / "body.json", tmp_path / "out.json"
    body.write_text(BODY)
    aws = environment_of("awscli") / "aws"
    for endpoint, name, expected in PLAN:
        before = counted(small)
        done = run(
            *(small, aws, "sagemaker-runtime", "invoke-endpoint", "--endpoint-name", endpoint),
            *("--target-model", f"cli/{name}", "--content-type", "application/json"),
            *("--body", f"fileb://{body}", str(out), "--output", "json"),
        )
        after = counted(small)
        told = {key: after[key] - before.get(key, 0) for key in after}
        if expected[0] in {"miss", "hit", "disk"}:
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["InvokedProductionVariant"] == "AllTraffic"
            assert json.loads(out.read_text())["outputs"][0]["data"] == [expected[1]]
            assert told[f'triton_adapter_endpoint_requests_total{{cache="{expected[0]}"}}'] == 1
            continue
        assert f"An error occurred ({expected[0]}) when calling the InvokeEndpoint" in done.stderr
        if expected[2] is not None:
            assert f"Received server error ({expected[2]}) from primary with" in done.stderr
        sent = sum(
            times for key, times in told.items() if f'code="{expected[1]}",frontend="endp' in key
        )
        check_retries(expected, int(sent) - 1)


def counted(adapter: RunningAdapter) -> dict[str, float]:
    with Client(adapter.admin) as admin:
        lines = admin.get("/metrics").body.decode().splitlines()
    pairs: list[Any] = [line.rsplit(" ", 1) for line in lines if "_requests_total{" in line]
    return {name: float(value) for name, value in pairs}

"""boto3 calls of many models in a store: a few are called often, most seldom (Zipf).

The first call of a model fetches and loads it, and may evict another: look at the percentiles.
"""

import os
import random
import tarfile
import time
from pathlib import Path

import boto3
import botocore
import shared
from botocore.exceptions import BotoCoreError, ClientError
from locust import User, events, task

# The folder that `make run` serves as its store.
STORE = Path(os.environ.get("LOAD_STORE", Path(__file__).resolve().parents[2] / "store"))
KEYS = [f"load-{number:02}.tar.gz" for number in range(1, 11)]
# The k-th model gets 1/k of the calls of the first one.
WEIGHTS = [1 / number for number in range(1, len(KEYS) + 1)]


@events.test_start.add_listener
def fill_store(**_):
    """Put each model into the store as an archive, under its name once it is whole."""
    STORE.mkdir(parents=True, exist_ok=True)
    for key in KEYS:
        part = STORE / f".{key}"
        with tarfile.open(part, mode="w:gz") as archive:
            archive.add(shared.EXAMPLES / "digits", arcname=".")
        part.rename(STORE / key)


class Caller(User):
    """Calls one model after the other with an unchanged boto3."""

    host = "http://127.0.0.1:8080"

    def on_start(self):
        self.client = boto3.client(
            "sagemaker-runtime",
            endpoint_url=self.host,
            region_name="any",
            aws_access_key_id="any",
            aws_secret_access_key="any",
            # Count each answer: a retry would hide it.
            config=botocore.config.Config(retries={"total_max_attempts": 1}, read_timeout=120),
        )

    def on_stop(self):
        self.client.close()

    @task
    def invoke(self):
        [key] = random.choices(KEYS, WEIGHTS)
        started_at = time.perf_counter()
        error = None
        body = b""
        try:
            answer = self.client.invoke_endpoint(
                EndpointName="any",
                TargetModel=key,
                ContentType="application/json",
                Body=shared.SAMPLE,
            )
            body = answer["Body"].read()
            fault = shared.find_fault(body)
            if fault is not None:
                error = ValueError(fault)
        except (BotoCoreError, ClientError) as failure:
            error = failure
        self.environment.events.request.fire(
            request_type="boto3",
            name="InvokeEndpoint",
            response_time=(time.perf_counter() - started_at) * 1000,
            response_length=len(body),
            exception=error,
        )

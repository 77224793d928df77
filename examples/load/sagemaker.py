"""Invocations of one model by SageMaker's contract for multi-model containers."""

import shared
from locust import FastHttpUser, events, task


@events.test_start.add_listener
def load(environment, **_):
    shared.load_model(environment.host or Caller.host, "digits", shared.DIGITS)


class Caller(FastHttpUser):
    """Sends one invocation after the other, on one connection."""

    host = "http://127.0.0.1:8080"

    @task
    def invoke(self):
        path = "/models/digits/invoke"
        with self.client.post(
            path, data=shared.SAMPLE, headers=shared.JSON, catch_response=True
        ) as answer:
            if answer.ok and (fault := shared.find_fault(answer.content)) is not None:
                answer.failure(fault)

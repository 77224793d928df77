"""Invocations of one model while another is loaded and unloaded all the time.

Their latencies say what a load of one model costs the callers of another.
"""

import shared
from locust import FastHttpUser, constant, events, task


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


class Operator(FastHttpUser):
    """Loads a model and unloads it again, once a second."""

    host = Caller.host
    fixed_count = 1
    wait_time = constant(1)
    network_timeout = shared.CONTROL_SECONDS

    def on_start(self):
        shared.unload_model(self.host, "load-identity")

    def on_stop(self):
        shared.unload_model(self.host, "load-identity")

    @task
    def load_and_unload(self):
        name = "load-identity"
        body = {"model_name": name, "url": str(shared.IDENTITY)}
        with self.client.post("/models", json=body, catch_response=True) as answer:
            loaded = answer.ok
        if loaded:
            self.client.delete(f"/models/{name}", name="/models/{name}")

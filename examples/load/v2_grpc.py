"""Inferences of one model by the V2 protocol over gRPC, with NVIDIA's tritonclient.

Locust runs its callers as greenlets of gevent; grpcio needs `init_gevent` to let them switch.
"""

import os
import sys
import time
from urllib.parse import urlsplit

import grpc.experimental.gevent
import numpy as np
import shared
from locust import User, events, task
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

grpc.experimental.gevent.init_gevent()
_TIMEOUT_SECONDS = 60


@events.quit.add_listener
def leave(exit_code, **_):
    """End the process at once: once gevent has ended, gRPC's channels would block at its exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


@events.test_start.add_listener
def load(environment, **_):
    """Load the model. Ends the run with the reason if that fails: no figure would mean anything."""
    host = environment.host or Caller.host
    try:
        with InferenceServerClient(urlsplit(host).netloc) as client:
            client.load_model("digits", client_timeout=_TIMEOUT_SECONDS)
    except InferenceServerException as error:
        print(f"{host} does not load digits; start an adapter with `make run`: {error}")
        leave(2)


class Caller(User):
    """Sends one inference after the other. All callers of a process share gRPC's connection."""

    host = "grpc://127.0.0.1:8085"

    def on_start(self):
        self.client = InferenceServerClient(urlsplit(self.host).netloc)
        images = np.array(shared.IMAGES, np.float32)
        self.images = InferInput("IMAGE", images.shape, "FP32")
        self.images.set_data_from_numpy(images)

    def on_stop(self):
        self.client.close()

    @task
    def infer(self):
        started_at = time.perf_counter()
        error = None
        size = 0
        try:
            answer = self.client.infer("digits", [self.images], client_timeout=_TIMEOUT_SECONDS)
            size = answer.get_response().ByteSize()
            labels = answer.as_numpy("LABEL")
            if len(labels) != len(shared.IMAGES):
                error = ValueError(f"{len(labels)} labels for {len(shared.IMAGES)} images")
        except InferenceServerException as failure:
            error = failure
        self.environment.events.request.fire(
            request_type="gRPC",
            name="ModelInfer",
            response_time=(time.perf_counter() - started_at) * 1000,
            response_length=size,
            exception=error,
        )

"""A tour of the adapter: out of memory without a GPU, the eviction that heals it, ModelMesh, boto3.

python examples/demo/demo.py [FLAG OF SERVE]...
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import boto3
import requests
from moto.server import ThreadedMotoServer

EXAMPLES = Path(__file__).resolve().parents[1]
MODELS = EXAMPLES / "models"
SETTINGS = Path(__file__).with_name("adapter.yaml")
SECONDS = 120  # for a start, a stop or a call


class StepFailed(Exception):
    pass


@contextmanager
def step(title):
    """Print the title of a step. Whatever ends the step early is shown with its title."""
    print(f"\n{title}", flush=True)
    try:
        yield
    except Exception as error:
        raise StepFailed(f"{title}\n  {error}") from error


def check(is_right, text, reason=""):
    if not is_right:
        raise StepFailed(f"{text}: {reason}")
    print(f"  ok  {text}", flush=True)


def handle_signals(handler):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


@contextmanager
def adapter(scratch, *flags):
    """Run `triton-adapter serve`, and yield the addresses of its listeners."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("ADAPTER_")}
    program = Path(sys.executable).with_name("triton-adapter")
    command = [program, "serve", f"--config={SETTINGS}", *flags, *sys.argv[1:]]
    log = scratch / "log"
    handle_signals(signal.default_int_handler)
    # Started by another thread, as signals interrupt only the first one; and in a session of its
    # own, so that Ctrl-C reaches this script alone.
    with ThreadPoolExecutor(1) as starter, log.open("w") as out:
        options = {"env": environ, "stdout": out, "stderr": out, "start_new_session": True}
        starting = starter.submit(subprocess.Popen, command, **options)
        try:
            yield wait_for_listeners(starting.result(), log)
        finally:
            handle_signals(signal.SIG_IGN)
            starting.result().terminate()
            starting.result().wait(SECONDS)


def wait_for_listeners(process, log):
    """Return the addresses that the log names, once it says that the adapter is ready."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        lines = log.read_text().splitlines()
        if any('"adapter.started"' in line for line in lines):
            check(is_right=True, text="the adapter and its Triton are ready")
            opened = [json.loads(line) for line in lines if '"adapter.listening"' in line]
            return {event["listener"]: event["address"] for event in opened}
        time.sleep(0.1)
    raise StepFailed(f"the adapter did not start; the end of its log:\n{log.read_text()[-2000:]}")


class Container:
    """The calls that SageMaker makes of the container of a multi-model endpoint."""

    def __init__(self, address):
        self._base = f"http://{address}"

    def call(self, method, path, status, body=None, note=""):
        """Make a call and check the status of its answer."""
        started_at = time.monotonic()
        answer = requests.request(method, self._base + path, json=body, timeout=SECONDS)
        seconds = time.monotonic() - started_at
        text = f"{method} {path} {note}".strip()
        shown = f"{text:<34} {answer.status_code} {seconds:7.2f} s"
        check(answer.status_code == status, shown, f"not {status}: {answer.text}")
        return answer.json() if answer.text else {}

    def load(self, name, folder, status=200):
        body = {"model_name": name, "url": str(folder)}
        return self.call("POST", "/models", status, body, note=name)

    def unload(self, name):
        self.call("DELETE", f"/models/{name}", 200)

    def invoke(self, name, body, status=200):
        return self.call("POST", f"/models/{name}/invoke", status, body)


def show_refusal(answer, code):
    """Print the text and the figures of an out-of-memory answer."""
    print(f"      {answer['error'].splitlines()[0]}")
    sizes = [f"{kind} {answer[f'{kind}_bytes'] >> 20} MiB" for kind in ("needed", "free", "limit")]
    check(answer["code"] == code, f"{answer['code']}: {', '.join(sizes)}", f"not {code}")


def copy_hungry(folder, allocates="700MiB", device="2GiB"):
    """Copy the model `hungry`, which takes memory at its load, with other sizes."""
    shutil.copytree(MODELS / "hungry", folder)
    text = (folder / "config.pbtxt").read_text()
    text = text.replace("700MiB", allocates).replace("2GiB", device)
    (folder / "config.pbtxt").write_text(text)
    return folder


def tour_container(scratch, addresses):
    container = Container(addresses["http"])
    with step("A trained model: handwritten digits"):
        sample = json.loads((MODELS / "digits" / "sample.json").read_text())
        container.load("digits", MODELS / "digits")
        outputs = container.invoke("digits", sample)["outputs"]
        [labels] = [output["data"] for output in outputs if output["name"] == "LABEL"]
        check(labels == sample["labels"], f"it reads {labels}", f"true are {sample['labels']}")

    with step("Out of memory at a load: models of 700, 700 and 750 MiB, a device of 2 GiB"):
        alpha = copy_hungry(scratch / "alpha")
        gamma = copy_hungry(scratch / "gamma", allocates="750MiB")
        container.load("alpha", alpha)
        container.load("beta", copy_hungry(scratch / "beta"))
        # Nobody knows the size of a new package, so Triton tries to load it, and fails.
        show_refusal(container.load("gamma", gamma, status=507), "OutOfMemory")
        print("  so the platform evicts a model that it does not need now, and tries again:")
        container.unload("alpha")
        container.load("gamma", gamma)

    with step("A size that was measured: refused before Triton tries"):
        show_refusal(container.load("alpha", alpha, status=507), "InsufficientMemory")
        container.unload("beta")
        container.load("alpha", alpha)

    with step("Out of memory while a model computes"):
        container.load("hungry_infer", MODELS / "hungry_infer")
        tensor = {"name": "MIB", "datatype": "INT64", "shape": [1], "data": [1000]}
        request = {"inputs": [tensor]}
        show_refusal(container.invoke("hungry_infer", request, status=507), "OutOfMemory")
        container.unload("alpha")
        container.invoke("hungry_infer", request)

    with step("The calls of ModelMesh, over gRPC: examples/modelmesh/client.py"):
        client = EXAMPLES / "modelmesh" / "client.py"
        command = [sys.executable, client, addresses["grpc"], "identity", MODELS / "identity"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        print("".join(f"      {line}\n" for line in done.stdout.splitlines()), end="")
        check(done.returncode == 0, "load, inference and unload", done.stderr)


@contextmanager
def bucket(scratch):
    """Serve a bucket with four models on this machine, at the address for AWS's SDKs."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        os.environ.update(
            AWS_ENDPOINT_URL_S3=f"http://{host}:{port}",
            AWS_ACCESS_KEY_ID="any",
            AWS_SECRET_ACCESS_KEY="any",
            AWS_DEFAULT_REGION="us-east-1",
        )
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket="demo")
        archive = scratch / "model.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(copy_hungry(scratch / "model", allocates="200MiB", device="800MiB"), ".")
        for name in ("ant", "bee", "cat", "dog"):
            s3.upload_file(str(archive), "demo", f"models/{name}.tar.gz")
        yield
    finally:
        server.stop()


def invoke_endpoint(client, name, cache):
    """Call the endpoint as on AWS, and check where it found the model."""
    tensor = {"name": "IN", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}
    answer = client.invoke_endpoint(
        EndpointName="any",
        TargetModel=f"{name}.tar.gz",
        ContentType="application/json",
        Body=json.dumps({"inputs": [tensor]}),
    )
    [output] = json.loads(answer["Body"].read())["outputs"]
    found = answer["ResponseMetadata"]["HTTPHeaders"]["x-triton-adapter-cache"]
    is_right = found == cache and output["data"] == tensor["data"]
    check(is_right, f"invoke_endpoint {name}: {found}", f"not {cache}, or {output}")


def tour_endpoint(client):
    for name in ("ant", "bee", "cat"):
        invoke_endpoint(client, name, cache="miss")
    for name in ("ant", "cat"):
        invoke_endpoint(client, name, cache="hit")
    print("  there is room for three, so the model that was called least, bee, is evicted:")
    invoke_endpoint(client, "dog", cache="miss")
    invoke_endpoint(client, "bee", cache="disk")


def run_tours(scratch):
    roots = [f"--model-roots={scratch}", f"--model-roots={MODELS}"]
    with step("A stock Triton behind an adapter"), adapter(scratch, *roots) as addresses:
        tour_container(scratch, addresses)
    title = "An endpoint: four models of 200 MiB in a bucket, a device of 800 MiB, boto3"
    store = ["--model-store=s3://demo/models/", f"--cache-dir={scratch / 'cache'}"]
    with (
        step(title),
        bucket(scratch),
        adapter(scratch, *store, "--memory-limit=800MiB") as addresses,
    ):
        url = f"http://{addresses['http']}"
        tour_endpoint(boto3.client("sagemaker-runtime", endpoint_url=url))


def main():
    handle_signals(signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="triton-adapter-demo-") as folder:
            run_tours(Path(folder))
    except StepFailed as error:
        return f"\nFAILED: {error}"
    except KeyboardInterrupt:
        return "stopped; nothing is left running"
    print("\nevery step succeeded")
    return 0


if __name__ == "__main__":
    sys.exit(main())

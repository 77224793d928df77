"""What the scenarios share: the model, its request, the check of an answer, control calls."""

import json
import os
import sys
from pathlib import Path

import requests

EXAMPLES = Path(__file__).resolve().parent.parent / "models"
# The same folder, as the adapter sees it.
MODELS = Path(os.environ.get("LOAD_MODELS", EXAMPLES))
DIGITS = MODELS / "digits"
IDENTITY = MODELS / "identity"
# Eight images of digits, as a V2 request in JSON.
SAMPLE = (EXAMPLES / "digits" / "sample.json").read_bytes()
IMAGES = json.loads(SAMPLE)["inputs"][0]["data"]
JSON = {"Content-Type": "application/json"}
# A load of a python model takes some seconds on a busy machine.
CONTROL_SECONDS = 60


def find_fault(answer: bytes) -> str | None:
    """Return what is wrong with an answer to SAMPLE, or None if it has a label for each image."""
    outputs = {output["name"]: output for output in json.loads(answer)["outputs"]}
    labels = outputs["LABEL"]["data"]
    if len(labels) == len(IMAGES):
        return None
    return f"{len(labels)} labels for {len(IMAGES)} images"


def load_model(host: str, name: str, package: Path) -> None:
    """Load a model by SageMaker's contract. A model that is loaded already stays.

    Ends the run with the reason if the model cannot be loaded: no figure would mean anything.
    """
    body = {"model_name": name, "url": str(package)}
    try:
        answer = requests.post(f"{host}/models", json=body, timeout=CONTROL_SECONDS)
    except requests.RequestException as error:
        sys.exit(f"no adapter answers at {host}, start one with `make run`: {error}")
    if not answer.ok and answer.status_code != requests.codes.conflict:
        sys.exit(f"{host} does not load {package}: {answer.status_code} {answer.text}")


def unload_model(host: str, name: str) -> None:
    """Unload a model by SageMaker's contract. A model that is not loaded is none of our errors."""
    answer = requests.delete(f"{host}/models/{name}", timeout=CONTROL_SECONDS)
    if answer.status_code != requests.codes.not_found:
        answer.raise_for_status()

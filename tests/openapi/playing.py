"""Has schemathesis hold a running adapter against docs/openapi.yaml."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.openapi.document import SOURCE
from tests.running import COMPLETE, EXAMPLES, RunningAdapter, embedded_adapter

CONFIG = Path(__file__).with_name("schemathesis.toml")
_FOLDER = "/opt/ml/models"
# Tags of the calls at each listener.
AT_HTTP = tuple(
    f"--include-tag={tag}"
    for tag in ("sagemaker", "v2", "repository", "triton", "endpoint", "about")
)
AT_ADMIN = ("--include-tag=admin",)
CALLS = ("examples", "coverage", "fuzzing")
CYCLE = ("listModels", "loadModel", "getModel", "invokeModel", "unloadModel")
# They change the model that all others are about: it is gone, or has another configuration.
CHANGING = ("unloadModel", "repositoryLoad", "repositoryUnload")


@contextmanager
def opened_adapter(cache: Path) -> Iterator[RunningAdapter]:
    """One that serves all there is: the endpoint, and what `passthrough` opens."""
    flags = (f"--model-store={EXAMPLES}", f"--cache-dir={cache}")
    opening = {"ADAPTER_PASSTHROUGH": "shared_memory,trace,log"}
    with embedded_adapter(*flags, COMPLETE, environ=opening) as adapter:
        yield adapter


def phases(*names: str) -> str:
    return f"--phases={','.join(names)}"


def only(operations: Iterable[str]) -> list[str]:
    return [f"--include-operation-id={name}" for name in operations]


def without(operations: Iterable[str]) -> list[str]:
    return [f"--exclude-operation-id={name}" for name in operations]


def play(address: str, folder: Path, *flags: str, more: str = "", seconds: float = 500) -> str:
    """Return what it prints, if all is as described. `folder` is for files; `more` goes to the
    configuration.
    """
    document, config = folder / "openapi.yaml", folder / "schemathesis.toml"
    for path, text in ((document, SOURCE.read_text()), (config, CONFIG.read_text() + more)):
        path.write_text(text.replace(_FOLDER, str(EXAMPLES)))
    program = (sys.executable, "-m", "schemathesis.cli")
    command = [*program, f"--config-file={config}", "run", str(document), f"--url=http://{address}"]
    played = subprocess.run(
        [*command, "--warnings=off", "--request-timeout=100", *flags],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert played.returncode == 0, played.stdout + played.stderr
    return played.stdout

"""Time limits: an answer comes, and what was given up is taken down."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.asking import Gate, refusal
from tests.constants import HANG
from tests.running import COMPLETE, EXAMPLES, Client, RunningAdapter, embedded_adapter, wait_until
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton


@pytest.fixture
def hasty(model_root: Path) -> Iterator[RunningAdapter]:
    """A good load must end in the time that it may take, on a busy machine, too."""
    with embedded_adapter(
        f"--model-roots={model_root}",
        "--infer-timeout-seconds=2",
        "--load-timeout-seconds=8",
        COMPLETE,
        constants={HANG: 8},
    ) as adapter:
        yield adapter


@pytest.fixture
def asking(hasty: RunningAdapter) -> Iterator[Client]:
    with closing(hasty.client()) as client:
        yield client


def test_an_inference_that_takes_too_long_is_504(asking: Client, package: Path, gate: Gate) -> None:
    write_python_model(package, answer=gate.statements)
    assert asking.load("slow", package).status == 200

    reply = asking.post("/models/slow/invoke", infer_body(1.0))

    assert refusal(reply) == (504, "BackendTimeout", "slow")
    assert asking.get("/ping").status == 200
    gate.open()
    wait_until(
        lambda: asking.post("/models/slow/invoke", infer_body(1.0)).status == 200, 60, "it serves"
    )
    assert asking.delete("/models/slow").status == 200


def check_loads(asking: Client, name: str, url: Path) -> None:
    """A busy machine may need longer than the limit: 504, and 409 until that is taken down."""
    statuses: list[int] = []

    def loads() -> bool:
        statuses.append(asking.load(name, url).status)
        return statuses[-1] == 200

    wait_until(loads, 60, f"{name} is loaded")
    assert set(statuses) <= {200, 409, 504}


def test_a_load_that_takes_too_long_is_504_and_taken_down(
    hasty: RunningAdapter, asking: Client, package: Path, gate: Gate
) -> None:
    write_python_model(package, initialize=gate.statements)

    reply = asking.load("slow-load", package)

    assert refusal(reply) == (504, "BackendTimeout", "slow-load")
    check_loads(asking, "other", EXAMPLES / "identity")
    assert asking.delete("/models/other").status == 200
    gate.open()
    hasty.wait_for("model.load_failed", model_id="slow-load")
    assert refusal(asking.get("/models/slow-load"))[0] == 404
    wait_until(lambda: list(hasty.repository.iterdir()) == [], 60, "nothing of it is left")
    check_loads(asking, "slow-load", package)
    assert asking.delete("/models/slow-load").status == 200

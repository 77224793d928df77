"""A pod comes back with its models, and is not ready before: its two containers as processes."""

from contextlib import closing

import pytest

from tests.chart.chart import values_of
from tests.chart.pod import running_containers
from tests.running import Client, wait_until
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton


def statuses(client: Client, *models: str) -> list[int]:
    return [client.post(f"/models/{each}/invoke", infer_body(1.0)).status for each in models]


def test_killed_triton_container_gets_its_models_back(tmp_path):
    """Those of models.load and those that callers have loaded."""
    for name in ("wanted", "loaded"):
        write_python_model(tmp_path / name)
    values = {**values_of("cpu"), "models": {"load": ["wanted"]}}
    with (
        running_containers(values, tmp_path) as (adapter, triton),
        closing(adapter.client()) as client,
        closing(Client(adapter.listeners["metrics"])) as metrics,
    ):

        def is_ready() -> bool:
            return metrics.get("/readyz").status == 200

        adapter.wait_for("adapter.models_loaded", models=1)
        assert client.load("loaded", tmp_path / "loaded").status == 200
        assert (is_ready(), statuses(client, "wanted", "loaded")) == (True, [200, 200])

        triton.kill()
        wait_until(lambda: not is_ready(), 30, "it is not ready")
        triton.restart()
        wait_until(is_ready, 60, "it is ready again")
        assert statuses(client, "wanted") == [200]
        wait_until(lambda: statuses(client, "loaded") == [200], 60, "the other is back, too")

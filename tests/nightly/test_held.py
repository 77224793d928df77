"""What Triton's output takes of the event loop."""

import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.nightly.probed import FIGURES
from tests.running import embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_MOST = 0.01
_ROUNDS = 5
_SPARE_SECONDS = 0.2  # at both ends of a round: the request begins and ends
_PRINTS = """
import time
end = time.monotonic() + float(values[0])
while time.monotonic() < end:
    print({text}, end="", flush=True)
"""
_KINDS = {
    "nothing": "import time; time.sleep(float(values[0]))",
    "short lines": _PRINTS.format(text="'x\\n' * 5000"),
    "long lines": _PRINTS.format(text="'y' * 100_000 + '\\n'"),
}


def test_what_a_model_prints_holds_the_event_loop_for_10_ms_at_most(
    tmp_path: Path, seconds: float
) -> None:
    """In most rounds: a hold of ours would be in each, and one that the machine makes, in few."""
    figures = tmp_path / "figures"
    rounds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with (
        embedded_adapter(
            f"--model-roots={tmp_path}",
            environ={FIGURES: str(figures)},
            module="tests.nightly.probed",
        ) as adapter,
        closing(adapter.client(timeout=seconds + 60)) as client,
    ):
        for kind, answer in _KINDS.items():
            write_python_model(tmp_path / kind, answer=answer)
            assert client.load(kind, tmp_path / kind).status == 200
        for _ in range(_ROUNDS):
            for kind in _KINDS:
                began = time.monotonic()
                body = infer_body(seconds / _ROUNDS / len(_KINDS))
                assert client.post(f"/models/{quote(kind)}/invoke", body).status == 200
                rounds[kind].append((began + _SPARE_SECONDS, time.monotonic() - _SPARE_SECONDS))
        adapter.wait_for("triton.log_dropped")

    rows = [tuple(map(float, row.split())) for row in figures.read_text().splitlines()]
    middle = {}
    for kind, times in rounds.items():
        most = [max((h for at, h in rows if a <= at <= b), default=0.0) for a, b in times]
        middle[kind] = sorted(most)[_ROUNDS // 2]
        shown = ", ".join(f"{each * 1e3:.1f}" for each in most)
        print(f"{kind}: the event loop was held for {shown} ms at most")  # noqa: T201
    assert max(middle.values()) <= _MOST, middle

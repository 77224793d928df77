"""/metrics of the real command: in Prometheus's form, and no larger for what callers choose."""

import re
import secrets
from contextlib import closing

import grpc
import pytest

from tests.grpc_calls import calls_to
from tests.journeys.observability.promtool import needs_promtool, promtool
from tests.running import EXAMPLES, Client, RunningAdapter
from tests.trees import infer_body

pytestmark = pytest.mark.triton


def page(adapter: RunningAdapter) -> str:
    with closing(Client(adapter.admin)) as admin:
        return admin.get("/metrics").body.decode()


def value(adapter: RunningAdapter, series: str) -> float:
    [found] = re.findall(rf"^{re.escape(series)} (\S+)$", page(adapter), re.MULTILINE) or [0]
    return float(found)


def ask_of_everything(adapter: RunningAdapter, word: str) -> None:
    """`word` wherever a caller may put one of its own."""
    with closing(adapter.client()) as client:
        client.load(word, EXAMPLES / "identity")
        client.load(f"{word}-none", f"/{word}")
        client.post(f"/models/{word}/invoke", infer_body(1.0))
        client.post(f"/models/{word}/invoke", {word: word}, {"X-Request-Id": word})
        client.post(f"/v2/models/{word}/infer", infer_body(1.0))
        for method in ("GET", "POST", "PUT", word.upper()):
            for path in (f"/{word}", f"/models/{word}", f"/v2/{word}", f"/v2/models/{word}/{word}"):
                client.request(method, path)
        client.delete(f"/models/{word}")
    with calls_to(adapter.grpc) as calls:
        calls.refused_infer(word, 1.0)
        unknown = calls.channel.unary_unary(f"/inference.GRPCInferenceService/{word}")
        with pytest.raises(grpc.RpcError):
            unknown(b"", timeout=30)


def series_of(text: str) -> set[str]:
    return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}


def test_nothing_that_callers_choose_makes_a_series(adapter: RunningAdapter):
    ask_of_everything(adapter, "any")  # a second load has a size that was learned from the first
    first, second = f"first{secrets.token_hex(4)}", f"second{secrets.token_hex(4)}"
    ask_of_everything(adapter, first)
    before = page(adapter)
    ask_of_everything(adapter, second)
    after = page(adapter)
    assert series_of(after) == series_of(before)
    assert first not in before.lower()
    assert second not in after.lower()


@needs_promtool
def test_promtool_finds_no_fault(adapter: RunningAdapter):
    ask_of_everything(adapter, "any")
    promtool("check", "metrics", given=page(adapter).encode())


def test_a_request_is_triton_s_share_and_the_adapters_own(adapter: RunningAdapter):
    labels = '{frontend="sagemaker",method="invoke"}'
    names = ("request", "upstream", "overhead")

    def figures() -> list[tuple[float, float]]:
        kinds = [f"adapter_{name}_seconds" for name in names]
        return [
            (value(adapter, f"{k}_count{labels}"), value(adapter, f"{k}_sum{labels}"))
            for k in kinds
        ]

    with closing(adapter.client()) as client:
        assert client.load("echo", EXAMPLES / "identity").status == 200
        before = figures()
        for _ in range(5):
            assert client.post("/models/echo/invoke", infer_body(1.0)).status == 200
        assert client.post("/models/none/invoke", infer_body(1.0)).status == 404
        after = figures()
    counts = [new[0] - old[0] for new, old in zip(after, before, strict=True)]
    assert counts == [6, 5, 5]  # what Triton was not asked for has no share of it
    total, upstream, own = [new[1] - old[1] for new, old in zip(after, before, strict=True)]
    assert 0 < upstream < total
    assert 0 < own < total


def test_the_build_and_the_idle_time_of_models_are_told(adapter: RunningAdapter):
    found = page(adapter)
    assert re.search(
        r'^adapter_build_info\{python="3[^"]*",triton="embedded",version="', found, re.MULTILINE
    )
    assert re.search(r"^adapter_ready 1.0$", found, re.MULTILINE)
    assert not re.search(r"^adapter_least_recently_used_seconds ", found, re.MULTILINE)
    with closing(adapter.client()) as client:
        assert client.load("echo", EXAMPLES / "identity").status == 200
    idle = value(adapter, "adapter_least_recently_used_seconds")
    assert 0 <= idle < 60

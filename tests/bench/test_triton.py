"""Every protocol on an adapter with its embedded Triton, and on that Triton itself."""

import pytest

from tests.running import EXAMPLES

pytestmark = pytest.mark.triton


@pytest.fixture
def listener(adapter, client):
    assert client.load("identity", EXAMPLES / "identity").status == 200
    return f"http://{adapter.http}"


@pytest.mark.parametrize("protocol", ["sagemaker-json", "sagemaker-binary"])
def test_the_adapter_answers_what_the_load_tester_sends(bench, adapter, listener, protocol):
    args = (f"--protocol={protocol}", f"--metadata=grpc://{adapter.grpc_address}", "--batch=4")

    bench(listener, "--model=identity", "--count=20", *args)

    assert (bench.code, bench.target["answered"]) == (0, 20), bench.target["errors_by_code"]


@pytest.mark.parametrize("protocol", ["v2-json", "v2-binary", "grpc"])
def test_triton_answers_what_the_load_tester_sends(bench, adapter, listener, protocol):
    url = f"http://{adapter.http_address}"
    if protocol == "grpc":
        url = f"grpc://{adapter.grpc_address}"

    bench(url, "--model=identity", "--count=20", f"--protocol={protocol}", "--batch=50000")

    assert (bench.code, bench.target["answered"]) == (0, 20), bench.target["errors_by_code"]


def test_the_adapter_is_compared_with_triton_while_a_model_comes_and_goes(bench, adapter, listener):
    bench(
        listener,
        "--model=identity",
        f"--compare=http://{adapter.http_address}",
        "--compare-protocol=v2-json",
        "--slices=1",
        "--duration=1",
        f"--churn={EXAMPLES / 'identity'}",
        "--churn-every=0.1",
        f"--churn-at={listener}",
        f"--cpu-pid={adapter.process.pid}",
    )

    one, other = bench.result["targets"]
    assert bench.code == 0, bench.result
    assert all(
        {each["operation"] for each in t["churn"]} == {"load", "unload"} for t in (one, other)
    )
    assert one["processes"][0]["cpu_seconds_per_request"] > 0
    assert bench.result["ratios"]["rate"]["slices"] == 1


def test_an_unknown_model_is_a_404_of_the_adapter(bench, listener, tmp_path):
    sample = EXAMPLES / "digits" / "sample.json"

    bench(listener, "--model=nobody", "--count=3", f"--payload={sample}")

    assert (bench.code, bench.errors) == (1, {"404 ModelNotFound": 3})

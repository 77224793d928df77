"""GPU memory from a metrics endpoint on a real port."""

import asyncio

import pytest
import pytest_asyncio

from adapter.triton.memory.metrics_page import TritonMetrics
from tests.fakes.metrics_endpoint import MIB, MetricsEndpoint


@pytest_asyncio.fixture
async def endpoint():
    endpoint = MetricsEndpoint()
    endpoint.total = {"GPU-a": 1000 * MIB, "GPU-b": 2000 * MIB}
    endpoint.used = {"GPU-a": 10 * MIB, "GPU-b": 20 * MIB}
    await endpoint.start()
    yield endpoint
    endpoint.opened.set()
    await endpoint.stop()


@pytest_asyncio.fixture
async def metrics(endpoint):
    metrics = TritonMetrics(lambda: endpoint.address)
    yield metrics
    await metrics.close()


async def used(metrics):
    reading = await metrics.read()
    return reading and {uuid: count // MIB for uuid, count in reading.used.items()}


async def test_every_gpu_of_the_page_is_read(endpoint, metrics):
    reading = await metrics.read()
    assert reading.used == endpoint.used
    assert {uuid: seen.limit_bytes for uuid, seen in reading.devices.items()} == endpoint.total
    assert (reading.source, reading.lag_seconds, metrics.why) == ("triton", 3.0, "")
    assert metrics.uuids == ("GPU-a", "GPU-b")
    assert {seen.index for seen in reading.devices.values()} == {None}


async def test_megabyte_page_with_model_lines_is_read(endpoint, metrics):
    line = b'nv_inference_count{model="nv_gpu_memory_used_bytes{",gpu_uuid="GPU-x"} 7\n'
    endpoint.page = (
        line * 16_000
        + b'nv_gpu_memory_total_bytes{gpu_uuid="GPU-a"} 1.048576e+09\n'
        + line
        + b'nv_gpu_memory_used_bytes{other="x",gpu_uuid="GPU-a",more="y"} 1048576'
    )
    assert len(endpoint.page) > MIB
    assert await used(metrics) == {"GPU-a": 1}
    assert metrics.uuids == ("GPU-a",)


@pytest.mark.parametrize("page", [b"", b"\x00\xff\nnot metrics {}\n", b"nv_gpu_utilization 1\n"])
async def test_page_without_gpus_says_so(endpoint, metrics, page):
    endpoint.page = page
    assert await metrics.read() is None
    assert (metrics.why, metrics.uuids) == ("Triton reports no GPU", ())


@pytest.mark.parametrize("total", ["0", "NaN", "+Inf", "much"])
async def test_a_gpu_without_a_total_is_unknown(endpoint, metrics, total):
    endpoint.page = (
        f'nv_gpu_memory_total_bytes{{gpu_uuid="GPU-a"}} {total}\n'
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-a"} 0\n'
    ).encode()
    assert await metrics.read() is None
    assert (metrics.why, metrics.uuids) == ("total is 0 (a DCGM error)", ("GPU-a",))


async def test_a_gpu_with_half_its_figures_is_unknown(endpoint, metrics):
    del endpoint.used["GPU-a"], endpoint.total["GPU-b"]
    assert await metrics.read() is None
    assert metrics.why == "total is 0 (a DCGM error)"


async def test_silent_known_gpu_makes_all_unknown(endpoint, metrics):
    await metrics.read()
    endpoint.total["GPU-b"] = endpoint.used["GPU-b"] = 0
    assert await metrics.read() is None
    assert metrics.why == "total is 0 (a DCGM error)"
    endpoint.total["GPU-b"] = 2000 * MIB
    assert await used(metrics) == {"GPU-a": 10, "GPU-b": 0}


async def test_ever_silent_gpu_is_left_out(endpoint, metrics):
    endpoint.total["GPU-b"] = 0
    assert await used(metrics) == {"GPU-a": 10}


async def test_returning_metrics_endpoint_is_read_again(endpoint, metrics):
    await metrics.read()
    await endpoint.stop()
    assert await metrics.read() is None
    assert metrics.why.startswith("the metrics endpoint cannot be reached: ")
    assert metrics.uuids == ("GPU-a", "GPU-b")
    await endpoint.start()
    assert await used(metrics) == {"GPU-a": 10, "GPU-b": 20}
    assert metrics.why == ""


@pytest.mark.parametrize("status", [302, 404, 500])
async def test_any_other_status_is_no_answer(endpoint, metrics, status):
    endpoint.status = status
    assert await metrics.read() is None
    assert metrics.why == f"the metrics endpoint cannot be reached: it answered {status}"


async def test_hanging_metrics_endpoint_costs_its_limit(endpoint):
    endpoint.hold()
    metrics = TritonMetrics(endpoint.address, timeout_seconds=0.05)
    async with asyncio.timeout(10):
        assert await metrics.read() is None
    assert metrics.why == "the metrics endpoint cannot be reached: no answer within 0.05 s"
    await metrics.close()


async def test_invalid_http_is_no_reading(endpoint):
    async def babble(reader, writer):
        await reader.readline()
        writer.write(b"\x00\x01 what?\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    metrics = TritonMetrics(f"{host}:{port}")
    assert await metrics.read() is None
    assert metrics.why.startswith("the metrics endpoint cannot be reached: ")
    await metrics.close()
    server.close()
    await server.wait_closed()


async def test_before_triton_is_up_there_is_no_endpoint():
    metrics = TritonMetrics(lambda: "")
    assert await metrics.read() is None
    assert metrics.why == "the metrics endpoint cannot be reached: Triton is not up yet"
    await metrics.close()

"""What of ours lies in a repository beside the models, as a real Triton sees it."""

import pytest
from tritonclient.grpc.aio import InferenceServerClient

from adapter.backend.embedded import EmbeddedTriton
from adapter.backend.sizes_file import FILE_NAME, LearnedFile
from adapter.packages.staging import Packages
from tests.packages.staged import place
from tests.trees import write_python_model

ANY_PORT = ("127.0.0.1", 0)


async def names(client):
    return [
        (model.name, model.state) for model in (await client.get_model_repository_index()).models
    ]


@pytest.mark.triton
async def test_triton_passes_over_the_file_of_sizes_at_its_start_and_at_loads(tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    file = LearnedFile(repository / FILE_NAME)
    await file.save({"a": 1})
    packages = Packages(repository, [tmp_path])
    await place(packages, "before", write_python_model(tmp_path / "models" / "m"))
    triton = EmbeddedTriton(
        tritonserver=None,
        repository=repository,
        http=ANY_PORT,
        grpc=ANY_PORT,
        metrics=ANY_PORT,
        extra_args=[],
        start_timeout_seconds=60,
        on_restart=None,
    )
    await triton.start()
    try:
        async with InferenceServerClient(triton.grpc_address) as client:
            assert await names(client) == [("before", "")]
            await client.load_model("before")
            await file.save({"a": 2})
            await place(packages, "after", tmp_path / "models" / "m")
            await client.load_model("after")
            assert await names(client) == [("after", "READY"), ("before", "READY")]
            assert await client.is_server_ready()
    finally:
        await triton.stop()
    assert file.load() == {"a": 2}
    assert [model.model_id for model in await packages.staged()] == ["id of after", "id of before"]

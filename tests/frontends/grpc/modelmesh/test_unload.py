"""unloadModel."""

import pytest

from adapter.errors import (
    BackendTimeout,
)


class TestUnload:
    @pytest.mark.parametrize("model_id", ["unknown", "", "a\0b", "x" * 5000])
    async def test_what_is_not_loaded_is_unloaded_already(self, front, model_id):
        await front.unload(model_id)

    async def test_a_failure_is_told(self, fakes, front):
        await front.load("m")
        fakes.calls.fail("unload m", BackendTimeout("no"))
        with pytest.raises(BackendTimeout):
            await front.unload("m")

"""Content types of a package: read at the load, and again after a restart of the adapter."""

import pytest

from adapter.core.model import ModelSource, TritonName
from adapter.packages.staging import Packages
from tests.packages.staged import make, place, prepare

IMAGES = """\
backend: "python"
input [{ name: "IN" data_type: TYPE_STRING dims: [1] }]
parameters { key: "adapter_content_types" value { string_value: "image/*" } }
"""


@pytest.mark.parametrize(("config", "types"), [(IMAGES, ("image/*",)), ('backend: "python"', None)])
async def test_adopted_model_keeps_its_content_types(tmp_path, config, types):
    (root := tmp_path / "models").mkdir()
    (repository := tmp_path / "repository").mkdir()
    packages = Packages(repository, [root])
    folder = make(root / "m", config)
    package = await prepare(packages, "a", folder)
    await place(packages, "a", folder)
    await packages.confirm(TritonName("a"), ModelSource(str(folder)), package.content_key, {})
    (model,) = await Packages(repository, [root]).staged()
    assert model.content_types == package.content_types
    assert (model.content_types.types if model.content_types else None) == types

"""Checks what a record tells of its model."""

import pytest

from adapter.core.artifacts import ArtifactKey
from adapter.core.model import (
    ModelId,
    ModelPart,
    ModelSource,
    Package,
    Placement,
    Role,
    StagedModel,
    TritonName,
)
from adapter.core.record import LoadedFor, ModelRecord, describe_staged


def make_record(name: str = "m") -> ModelRecord:
    return ModelRecord(ModelId("m"), TritonName(name), ModelSource("/m"), LoadedFor.PLATFORM)


def make_package(*configs: str | None) -> Package:
    parts = tuple(ModelPart(str(at), Role.ENTRY, text, ()) for at, text in enumerate(configs))
    return Package("/m", parts, size_bytes=1, declared_bytes=None, content_key="k")


def test_package_is_refused_before_its_inspection():
    record = make_record()
    with pytest.raises(ValueError, match="not inspected"):
        _ = record.inspected
    record.package = make_package(None)
    assert record.inspected is record.package


@pytest.mark.parametrize(
    ("configs", "can_run_beside"),
    [
        ([None], True),
        (["max_batch_size: 1"], True),
        (["sequence_batching { }"], False),
        ([None, None], False),
        ([], False),
    ],
)
def test_versions_run_beside_each_other(configs, can_run_beside):
    record = make_record()
    assert not record.can_run_beside
    record.package = make_package(*configs)
    assert record.can_run_beside is can_run_beside


def test_store_model_begins_with_its_key():
    record = make_record()
    assert record.origin == ModelSource("/m")
    record.key = ArtifactKey("", "m.tar.gz")
    assert record.origin == ArtifactKey("", "m.tar.gz")


def test_staged_model_keeps_what_its_note_tells():
    name = TritonName("m")
    staged = StagedModel(name, ModelId("m"), Placement((name,)), content_key="k")
    package = describe_staged(staged)
    assert package.content_key == "k"
    assert package.content_types is None
    record = make_record()
    record.package = package
    assert not record.can_run_beside

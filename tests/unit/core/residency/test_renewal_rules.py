from dataclasses import replace

import pytest

from adapter.core.model import ModelPart, Package, Role
from adapter.core.residency.terms import can_be_doubled


def package(*configs: str | None) -> Package:
    parts = tuple(ModelPart("m", Role.ENTRY, text, ()) for text in configs)
    return Package("/m", parts, 1, None, "key")


@pytest.mark.parametrize(
    ("configs", "answer"),
    [
        (['name: "m"'], True),
        ([None], True),
        (["sequence_batching { oldest {} }"], False),
        (["", ""], False),
    ],
)
def test_two_versions_of_one_stateless_model_may_be_there_at_once(configs, answer):
    assert can_be_doubled(package(*configs)) is answer


def test_two_versions_may_not_share_the_folder_beside_them():
    """Their code finds it by its name, of which Triton's repository has one."""
    neighbour = ModelPart("common", Role.NEIGHBOUR, None, ())
    assert not can_be_doubled(replace(package(""), neighbours=(neighbour,)))

"""Constants that tests change are where the adapter has them."""

import importlib

from tests import constants
from tests.cases import rows

PATHS = [
    value
    for name, value in vars(constants).items()
    if name.isupper() and str(value).startswith("adapter.")
]


@rows("path", PATHS)
def test_constant_is_a_number_of_the_adapter(path):
    module, _, name = path.rpartition(".")
    assert isinstance(getattr(importlib.import_module(module), name), int | float)

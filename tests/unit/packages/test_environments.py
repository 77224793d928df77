"""What is said of the Python environment that a python model brings."""

from pathlib import Path

import pytest

from adapter.core.model import ModelSource
from adapter.packages.inspect import inspect
from tests.trees import CONFIG, write_python_model

_PLACE = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "%s" } }\n'


def warnings(tmp_path: Path, numpy: str, place: str = "$$TRITON_MODEL_DIRECTORY/env") -> list[str]:
    package = write_python_model(tmp_path / "m", config=CONFIG + _PLACE % place)
    (package / "env/lib/python3.11/site-packages" / f"numpy-{numpy}.dist-info").mkdir(parents=True)
    found = inspect(ModelSource(str(package)), package, [str(tmp_path)])
    return [*found.warnings]


@pytest.mark.parametrize("numpy", ["2.0.0", "2.4.6", "3.0.0"])
def test_an_environment_with_numpy_2_is_warned_of(tmp_path: Path, numpy: str):
    [said] = warnings(tmp_path, numpy)
    assert said.startswith(f"{tmp_path}/m/env: has numpy {numpy}")
    assert "output tensor shape does not match size of output" in said
    assert "numpy<2" in said


def test_one_with_numpy_1_is_not(tmp_path: Path):
    assert warnings(tmp_path, "1.26.4") == []


@pytest.mark.parametrize(
    "place", ["/opt/env", "$$TRITON_MODEL_DIRECTORY/env.tar.gz", "env/../../x"]
)
def test_absent_or_packed_file_is_not_judged(tmp_path: Path, place: str):
    assert warnings(tmp_path, "2.4.6", place) == []

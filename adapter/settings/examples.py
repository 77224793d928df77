"""Where the example models are: beside the package in a checkout, inside it when installed."""

from pathlib import Path

_PACKAGE = Path(__file__).parent.parent


def examples_folder() -> Path:
    installed = _PACKAGE / "_examples"
    return installed if installed.is_dir() else _PACKAGE.parent / "examples" / "models"

"""Puts the OpenAPI document into the wheel as JSON, which adapter/frontends/openapi.py serves."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_DOCUMENT = "adapter/frontends/openapi.json"


class OpenApiHook(BuildHookInterface[Any]):
    """Converts docs/openapi.yaml for a wheel. A checkout reads the YAML itself."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        self._folder = Path(tempfile.mkdtemp())
        document = yaml.safe_load((Path(self.root) / "docs" / "openapi.yaml").read_text("utf-8"))
        written = self._folder / "openapi.json"
        written.write_text(json.dumps(document) + "\n", "utf-8")
        build_data["force_include"][str(written)] = _DOCUMENT

    def finalize(self, *_: Any) -> None:
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder)

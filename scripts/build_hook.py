"""Writes docs/openapi.yaml as JSON into the wheel, so that no YAML is parsed for a caller."""

import json
from pathlib import Path
from typing import Any

import yaml
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_IN_THE_WHEEL = "adapter/frontends/openapi.json"


class OpenApiJson(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # adapter/frontends/openapi.py reads the YAML of a checkout
        document = yaml.safe_load((Path(self.root) / "docs" / "openapi.yaml").read_text("utf-8"))
        written = Path(self.directory) / "openapi.json"
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(document) + "\n", "utf-8")
        build_data["force_include"][str(written)] = _IN_THE_WHEEL

    def finalize(self, *_: Any) -> None:
        (Path(self.directory) / "openapi.json").unlink(missing_ok=True)

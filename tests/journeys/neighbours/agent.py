"""KServe's agent, played: what it does to the folder of models, and what it calls.

From kserve/kserve v0.15.2 and its main of 2026-08-21, pkg/agent: puller.go, downloader.go,
watcher.go, syncer.go. It tries nothing twice, and only logs what it is answered.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.running import Client, Reply


@dataclass
class Agent:
    """`models` is its --model-dir. `storage` holds what a storageUri leads to."""

    models: Path
    storage: Path
    client: Client
    tracked: dict[str, dict[str, str]] = field(default_factory=dict)

    def restarted(self) -> "Agent":
        """Another one in its place, which knows what the SUCCESS files say."""
        found = self.models.glob("*/SUCCESS.*")
        known = {path.parent.name: json.loads(path.read_text()) for path in found}
        return Agent(self.models, self.storage, self.client, known)

    def config(self, *models: tuple[str, str]) -> list[Reply]:
        """models.json has changed: names, each with its storageUri. Return the answers in order."""
        told = {name: _spec(uri) for name, uri in models}
        answers = []
        for name, spec in told.items():
            if name not in self.tracked:
                answers.append(self._add(name, spec))
            elif self.tracked[name] != spec:
                answers += [self._remove(name), self._add(name, spec)]
        answers += [self._remove(name) for name in self.tracked if name not in told]
        self.tracked = told
        return answers

    def _add(self, name: str, spec: dict[str, str]) -> Reply:
        folder = self.models / name
        success = folder / f"SUCCESS.{hashlib.sha256(json.dumps(spec).encode()).hexdigest()}"
        if not success.exists():
            source = self.storage / spec["storageUri"].removeprefix("s3://")
            shutil.copytree(source, folder, dirs_exist_ok=True)
            success.write_text(json.dumps(spec))
        return self._post(name, "load")

    def _remove(self, name: str) -> Reply:
        shutil.rmtree(self.models / name)  # first the files
        return self._post(name, "unload")

    def _post(self, name: str, act: str) -> Reply:
        path = f"/v2/repository/models/{name}/{act}"
        return self.client.post(path, b"{}", {"Content-Type": "application/json"})


def _spec(uri: str) -> dict[str, str]:
    return {"storageUri": uri, "framework": "triton", "memory": "512Mi"}

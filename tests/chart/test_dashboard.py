"""The dashboard in its ConfigMap: that of one release."""

import json
import re
from typing import Any

import pytest

from tests.chart.chart import CHART, objects

FILE = json.loads((CHART / "files" / "dashboard.json").read_text())
ENABLED = {"metrics": {"dashboard": {"enabled": True}}, "checkApis": False}


def dashboard(**given: Any) -> tuple[str, dict[str, Any]]:
    """Its name in the sidecar's folder, and what it is."""
    found = [made for made in objects({**ENABLED, **given}) if made["kind"] == "ConfigMap"]
    [made] = [made for made in found if made["metadata"]["name"].endswith("-dashboard")]
    [(name, text)] = made["data"].items()
    return name, json.loads(text)


def variables(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in made["templating"]["list"]}


def test_two_releases_have_two_dashboards():
    """Grafana refuses a second one of a uid, and of a title in the same folder."""
    names = [{}, {"fullnameOverride": "other"}, {"namespaceOverride": "elsewhere"}]
    made = [dashboard(**given) for given in names]

    for found in (
        {name for name, _ in made},
        {d["uid"] for _, d in made},
        {d["title"] for _, d in made},
    ):
        assert len(found) == len(names)
    assert all(re.fullmatch(r"[a-z0-9-]{1,40}", d["uid"]) for _, d in made)  # as Grafana takes them
    assert made == [dashboard(**given) for given in names]


def test_it_shows_the_pods_of_its_release():
    found = variables(dashboard()[1])
    pods = found["pod"]["allValue"]

    assert found["namespace"]["current"] == {"text": "serving", "value": "serving"}
    assert re.fullmatch(pods, "demo-triton-adapter-6b7f9d4c8c-x2x4z")
    assert not re.fullmatch(pods, "other-triton-adapter-6b7f9d4c8c-x2x4z")
    assert found["pod"]["regex"] == f"/^{pods}$/"


def test_pods_that_modelmesh_names_are_all_shown():
    settings = {"admin": "0.0.0.0:8081"}
    found = variables(dashboard(mode="servingRuntime", settings=settings)[1])
    assert (found["pod"]["allValue"], found["pod"]["regex"]) == (".*", "")


@pytest.mark.parametrize("part", ["panels", "annotations", "time", "refresh", "schemaVersion"])
def test_all_else_is_as_in_the_file(part):
    assert dashboard()[1][part] == FILE[part]

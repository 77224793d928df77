"""Helm's own SDK, as much of it as the tests use. No helm binary, no cluster."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "triton-adapter"
CASES = sorted((CHART / "ci").glob("*-values.yaml"))
NOTES = "NOTES.txt"
APIS = (
    *("monitoring.coreos.com/v1", "keda.sh/v1alpha1", "serving.kserve.io/v1alpha1"),
    "gateway.envoyproxy.io/v1alpha1",
)
NEWEST = "1.37"

Object = dict[str, Any]


def case(path: Path) -> str:
    return path.name.removesuffix("-values.yaml")


def values_of(name: str) -> dict[str, Any]:
    return helm.values_from_yaml((CHART / "ci" / f"{name}-values.yaml").read_text())


@cache
def _chart() -> helm.Chart:
    return helm.Chart.load(CHART)


def render(
    values: Mapping[str, Any], *, kube_version: str = NEWEST, api_versions: Sequence[str] = ()
) -> dict[str, str]:
    """Manifests by the names of their templates. The public call takes no versions, hence this.

    Raises helm.HelmError: HelmValuesError for the schema, HelmRenderError for `fail`.
    """
    options = {
        "name": "demo",
        "namespace": "serving",
        "kube_version": f"v{kube_version}.0",
        "api_versions": list(api_versions),
    }
    rendered = helm._native.call_string(
        "helm_render", _chart()._raw(), json.dumps(values), json.dumps(options)
    )
    return {name.partition("templates/")[2]: text for name, text in json.loads(rendered).items()}


def objects(values: Mapping[str, Any], kube_version: str = NEWEST) -> list[Object]:
    return json.loads(_objects(json.dumps(values), kube_version))  # the caller's own, to change


@cache
def _objects(values: str, kube_version: str) -> str:
    rendered = render(json.loads(values), kube_version=kube_version)
    rendered.pop(NOTES)
    found = (
        made
        for name in sorted(rendered)
        for made in yaml.load_all(rendered[name], yaml.CSafeLoader)
    )
    return json.dumps([made for made in found if made is not None])


def only(kind: str, values: Mapping[str, Any]) -> Object:
    [found] = [made for made in objects(values) if made["kind"] == kind]
    return found


def pod_spec(values: Mapping[str, Any]) -> Object:
    return only("Deployment", values)["spec"]["template"]["spec"]


def runtime_spec(values: Mapping[str, Any]) -> Object:
    [spec] = [o["spec"] for o in objects(values) if o["kind"].endswith("ServingRuntime")]
    return spec


def containers(spec: Object) -> dict[str, Object]:
    return {c["name"]: c for c in [*spec.get("initContainers", []), *spec["containers"]]}


def variables(values: Mapping[str, Any]) -> dict[str, str]:
    """What the adapter's environment gets from the chart, as kubelet would put it together."""
    if values.get("mode") != "servingRuntime":
        [config] = [o for o in objects(values) if o["kind"] == "ConfigMap" and is_settings(o)]
        return config["data"]
    container = containers(runtime_spec(values))["adapter"]
    return {e["name"]: e.get("value", str(8 * 2**30)) for e in container["env"]}


def is_settings(config: Object) -> bool:
    return any(name.startswith("ADAPTER_") for name in config.get("data", {}))

"""Every name of Vertex AI's contract for containers."""

import pytest

from adapter.errors import InvalidSettings
from adapter.settings import Loaded, load_settings
from adapter.settings.vertex import VertexRoutes

ROUTES = {"AIP_PREDICT_ROUTE": "/predict", "AIP_HEALTH_ROUTE": "/health"}
AIP = {"AIP_MODE": "PREDICTION", **ROUTES}


def load(flags: dict[str, object] | None = None, **environ: str) -> Loaded:
    return load_settings(flags or {}, environ, None)


def problems(flags: dict[str, object] | None = None, **environ: str) -> list[str]:
    with pytest.raises(InvalidSettings) as caught:
        load(flags, **environ)
    return caught.value.problems


def test_the_names_are_read_in_the_mode_of_predictions_alone():
    names = AIP | {"AIP_HTTP_PORT": "9000", "AIP_STORAGE_URI": "gs://bucket/models"}
    loaded = load(**names)
    assert loaded.vertex_routes == VertexRoutes("/predict", "/health")
    assert str(loaded.settings.http) == "0.0.0.0:9000"
    assert str(loaded.settings.model_store) == "gs://bucket/models"
    assert loaded.settings.on_demand

    for mode in ({}, {"AIP_MODE": "TRAINING"}):
        others = {name: value for name, value in names.items() if name != "AIP_MODE"}
        loaded = load(**others, **mode)
        assert (loaded.vertex_routes, loaded.settings.model_store) == (None, None)
        assert str(loaded.settings.http) == "127.0.0.1:8080"


@pytest.mark.parametrize("missing", list(ROUTES))
def test_both_routes_must_be_there_in_that_mode(missing):
    [problem] = problems(**{name: value for name, value in AIP.items() if name != missing})
    assert problem.startswith(f"environment {missing}: not set")
    assert len(problems(AIP_MODE="PREDICTION")) == 2


def test_one_route_for_both_is_refused():
    [problem] = problems(**AIP | {"AIP_HEALTH_ROUTE": "/predict"})
    assert problem.endswith("'/predict': must differ from AIP_PREDICT_ROUTE")


@pytest.mark.parametrize("route", ["predict", "/", "/a b", "/a/", "/a?b"])
def test_a_route_is_a_path(route):
    [problem] = problems(**AIP | {"AIP_PREDICT_ROUTE": route})
    assert problem.startswith(f"environment AIP_PREDICT_ROUTE: {route!r}: ")
    assert "write a path such as /v1/predict: more than a slash, without one at its end" in problem


def test_a_setting_of_our_own_beats_the_variable():
    loaded = load({"http": "127.0.0.1:7000"}, **AIP, AIP_HTTP_PORT="9000")
    assert str(loaded.settings.http) == "127.0.0.1:7000"


def test_settings_that_need_a_store_have_that_of_the_platform():
    loaded = load({"preload": ["m"]}, **AIP, AIP_STORAGE_URI="gs://bucket/models")
    assert loaded.settings.preload == ("m",)

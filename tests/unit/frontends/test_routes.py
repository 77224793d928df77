"""The table of calls: which path is which."""

from adapter.frontends.routes import find
from tests.cases import rows


def path_of(*segments: str) -> str | None:
    found = find(segments)
    return None if found is None else found.path


@rows(
    ("segments", "path"),
    [
        (["models", "a/b", "invoke"], "/models/{model_name}/invoke"),
        (["v2", "models", "stats"], "/v2/models/stats"),
        (["v2", "models", "stats", "infer"], "/v2/models/{model_name}/infer"),
        (["v2", "models", "stats", "stats"], "/v2/models/{model_name}/stats"),
        (["v2", "models", "m", "versions", "1"], "/v2/models/{model_name}/versions/{version}"),
        (["v2", "models", "m", "versions", "one"], None),
        (["v2", "models", "m", "versions", "1", "trace", "setting"], None),
        (["v2", "models"], None),
        (["models", "m", "infer"], None),
        ([""], "/"),
        (["", ""], None),
    ],
)
def test_what_clients_choose_is_no_part_of_path(segments, path):
    assert path_of(*segments) == path


def test_path_keeps_its_callers_choices():
    region = find(["v2", "systemsharedmemory", "region", "a/{b}", "status"])
    version = find(["v2", "models", "{m}", "versions", "2", "infer"])

    assert region.below_v2() == "/systemsharedmemory/region/a%2F%7Bb%7D/status"
    assert version.below_model() == "/versions/2/infer"

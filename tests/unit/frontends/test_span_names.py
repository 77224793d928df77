"""Names of spans: few, whatever clients choose."""

import pytest

from adapter.frontends.http.middleware import template_of


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("/models/a%2Fb/invoke", "/models/{model_name}/invoke"),
        ("/v2/models/m/versions/1/infer", "/v2/models/{model_name}/versions/{version}/infer"),
        ("/v2/models/stats", "/v2/models/stats"),
        ("/endpoints/mine/invocations?a=b", "/endpoints/{endpoint_name}/invocations"),
    ],
)
def test_what_clients_choose_is_no_part_of_a_name(target: str, name: str) -> None:
    assert template_of(target) == name

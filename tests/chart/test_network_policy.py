"""Who may reach which port of the chart's pods, and whom they may call."""

import json

from tests.cases import rows
from tests.chart.chart import (
    CASES,
    case,
    objects,
    only,
    values_of,
)

PEERS = ("management", "monitoring")


def opened(values):
    """Which ports the policy opens to the peers of each of its lists."""
    peers = {name: [{"podSelector": {"matchLabels": {"for": name}}}] for name in PEERS}
    rules = only("NetworkPolicy", {"networkPolicy": peers, **values})["spec"]["ingress"]
    named = {json.dumps(each[0]): name for name, each in peers.items()}
    return {
        named[json.dumps(rule["from"][0])]: {port["port"] for port in rule["ports"]}
        for rule in rules
    }


def test_prometheus_reaches_metrics_alone():
    assert opened({}) == {"management": {8080, 8085}, "monitoring": {8082}}
    assert opened({"service": {"admin": 8081}})["management"] == {8080, 8085, 8081}
    assert opened({"settings": {"metrics": "off"}})["monitoring"] == {8081}


def rules_of(values):
    return only("NetworkPolicy", values)["spec"]["ingress"]


@rows("path", CASES)
def test_network_policy_has_no_rule_for_everybody(path):
    values = values_of(case(path))
    if values.get("mode") == "servingRuntime":
        assert "NetworkPolicy" not in {made["kind"] for made in objects(values)}
        return
    is_open = values.get("networkPolicy", {}).get("open", False)

    assert rules_of(values)
    for rule in rules_of(values):
        assert bool(rule.get("from")) is not is_open


def test_egress_is_limited_only_by_values():
    def policy(**given):
        return only("NetworkPolicy", {"networkPolicy": given})["spec"]

    assert policy()["policyTypes"] == ["Ingress"]
    assert "egress" not in policy()
    assert (policy(egress=[])["policyTypes"], policy(egress=[])["egress"]) == (
        ["Ingress", "Egress"],
        [],
    )
    values = values_of("network-policy")
    named = only("NetworkPolicy", values)["spec"]
    assert named["egress"] == values["networkPolicy"]["egress"]
    assert named["ingress"][-1:] == values["networkPolicy"]["extraIngress"]


def test_unnamed_peers_must_be_pods_of_the_namespace():
    own = [{"podSelector": {}}]

    assert [rule["from"] for rule in rules_of({})] == [own, own]

    prometheus = [{"namespaceSelector": {}}]
    named = rules_of({"networkPolicy": {"open": True, "monitoring": prometheus}})
    assert [rule.get("from") for rule in named] == [None, prometheus]

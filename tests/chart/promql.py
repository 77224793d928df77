"""Has promtool play series through rules and queries."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.journeys.observability.promtool import promtool


def check_queries(
    folder: Path,
    series: Mapping[str, str],  # the values of each, as promtool writes them
    expected: Mapping[str, Sequence[Mapping[str, Any]]],  # the samples of each query
    *,
    at_minutes: Sequence[int] = (10,),
    rules: Mapping[str, Any] | None = None,
) -> None:
    """Check the samples that each query has at each of these minutes."""
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": query, "eval_time": f"{minute}m", "exp_samples": samples}
            for query, samples in expected.items()
            for minute in at_minutes
        ],
    }
    test = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}
    (folder / "rules.yaml").write_text(json.dumps(rules or {"groups": []}))
    (folder / "test.yaml").write_text(json.dumps(test))
    promtool("test", "rules", folder / "test.yaml")


def query_of(rule: Mapping[str, Any], metric: str) -> str:
    """Return the query of a rule of prometheus-adapter, as it is filled in for the pods a and b."""
    query = str(rule["metricsQuery"])
    for name, stands_for in {
        "Series": metric,
        "LabelMatchers": 'namespace="serving",pod=~"a|b"',
        "GroupBy": "pod",
    }.items():
        query = query.replace(f"<<.{name}>>", stands_for)
    return query

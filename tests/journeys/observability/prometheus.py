"""A real Prometheus, of the Debian package, and rules that wait for seconds and not minutes."""

import json
import re
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.ports import free_ports
from tests.running import Client, RunningAdapter, wait_until

_A_MINUTE = 60
# the durations that rules compare with: how long a start takes, and when a model counts as in use
_SECONDS_OF_RULES = ("< 600", "< 120")


def hurried(rules: str) -> str:
    """Rules in which each minute is a second: `for`, ranges, and the durations compared with.
    Counts and shares stay as they are.
    """
    rules = re.sub(r"(for: |\[)(\d+)m\b", r"\1\2s", rules)
    rules = re.sub(r"\[(\d+)h(?=[\]:])", lambda found: f"[{int(found[1]) * _A_MINUTE}s", rules)
    rules = re.sub(r"(\[\d+s:\d+)m\]", r"\1s]", rules)  # the step of a subquery
    for words in _SECONDS_OF_RULES:
        rules = rules.replace(words, f"< {int(words[2:]) // _A_MINUTE}")
    return rules


def triton_metrics(adapter: RunningAdapter) -> str:
    """The address of the metrics of its embedded Triton."""
    found: list[str] = []

    def is_said() -> bool:
        said = "\n".join(event["line"] for event in adapter.events("triton.log"))
        found[:] = re.findall(r"Started Metrics Service at ([\w.:]+)", said)
        return bool(found)

    wait_until(is_said, 30, "Triton says where")
    [address] = found
    return address


class Prometheus:
    """Scrapes each second. Its targets come and go as those of a Kubernetes do: what is forgotten
    has no series any more, nor `up`.
    """

    def __init__(self, folder: Path, rules: str) -> None:
        [port] = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self._targets: dict[str, dict[str, str]] = {}
        self._file = folder / "targets.json"
        self._tell()
        (folder / "rules.yaml").write_text(rules)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "rules.yaml")],
            "scrape_configs": [
                {"job_name": "j", "file_sd_configs": [{"files": [str(self._file)]}]}
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        command = [
            str(shutil.which("prometheus")),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.address}",
        ]
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def watch(self, target: str, **labels: str) -> None:
        self._targets[target] = labels
        self._tell()

    def forget(self, target: str) -> None:
        del self._targets[target]
        self._tell()

    def _tell(self) -> None:
        groups = [{"targets": [each], "labels": more} for each, more in self._targets.items()]
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(groups))
        new.replace(self._file)

    def ask(self, expression: str) -> list[Any]:
        reply = self._get("/api/v1/query", {"query": expression})
        assert reply["status"] == "success", (expression, reply)
        return list(reply["data"]["result"])

    def value(self, expression: str) -> float:
        """Of one series, or the sum of what there is."""
        return sum(float(each["value"][1]) for each in self.ask(expression))

    def firing(self, **labels: str) -> set[str]:
        """Names of the alerts that fire now."""
        wanted = {"alertstate": "firing", **labels}
        given = ",".join(f'{name}="{value}"' for name, value in wanted.items())
        return {each["metric"]["alertname"] for each in self.ask(f"ALERTS{{{given}}}")}

    def alerts(self) -> list[dict[str, Any]]:
        return list(self._get("/api/v1/alerts", {})["data"]["alerts"])

    def _get(self, path: str, query: Mapping[str, str]) -> Any:
        with Client(self.address) as client:
            return client.get(f"{path}?{urllib.parse.urlencode(query)}").json()

    def is_ready(self) -> bool:
        try:
            with Client(self.address) as client:
                return client.get("/-/ready").status == 200
        except OSError:  # it does not listen yet
            return False

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self.log.close()


@contextmanager
def prometheus_in(folder: Path, rules: str) -> Iterator[Prometheus]:
    running = Prometheus(folder, rules)
    try:
        wait_until(running.is_ready, 30, "Prometheus is ready")
        yield running
    finally:
        running.stop()


def without(rules: str, *alerts: str) -> str:
    """As the chart leaves alerts out."""
    made = yaml.safe_load(rules)
    for group in made["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule["alert"] not in alerts]
    return yaml.safe_dump(made)

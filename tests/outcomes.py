"""What a run says at its end beside its failures: what was run again, and what was not run.

With CI set in the environment, a skip whose reason is not in MAY_BE_SKIPPED fails the run. What is
said is also appended to the file that TEST_OUTCOMES names, which `.ci/run` prints last.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

# Reasons, by their beginnings, for which a test may be left out in CI: what a machine may refuse.
MAY_BE_SKIPPED = (
    "perf_analyzer cannot be had",  # it is downloaded
    "perf_analyzer is for x86-64",
    "actionlint cannot be had",  # Go builds it
    "versitygw cannot be had",  # Go builds it
    "egctl cannot be had",  # Go builds it
    "a mount namespace takes a privilege",
    "no namespaces here",
    "no memory cgroups of v1 here",
    "what it is built of cannot be fetched",
    "no history of this clone has",  # a shallow one
    "of Triton 2.51",  # TRITON=... names another: tests/another_triton.py
    "the engine has no containerd image store",  # scripts/engine.sh starts one that has
)
# a rerun is for what truly races with a real Triton
MAY_RACE = 15


class Outcomes:
    def __init__(self) -> None:
        self.reruns: Counter[str] = Counter()
        self.skips: Counter[str] = Counter()

    @property
    def forbidden(self) -> list[str]:
        return sorted(reason for reason in self.skips if not reason.startswith(MAY_BE_SKIPPED))

    def lines(self) -> list[str]:
        return [
            f"tests run again: {self.reruns.total()}",
            *(f"  {test}" for test in sorted(self.reruns)),
            f"tests not run: {self.skips.total()}",
            *(f"  {count} x {reason}" for reason, count in sorted(self.skips.items())),
        ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":
            self.reruns[report.nodeid] += 1
        self._look_for_skip(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_for_skip(report)

    def _look_for_skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            assert isinstance(report.longrepr, tuple)
            self.skips[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if os.environ.get("CI") and self.forbidden and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = self.lines() if self.reruns or self.skips else []
        if os.environ.get("CI"):
            lines += [f"not allowed in CI (tests/outcomes.py): {each}" for each in self.forbidden]
        for line in lines:
            terminalreporter.line(line)
        if path := os.environ.get("TEST_OUTCOMES"):
            with Path(path).open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines or self.lines())


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of xdist: what its processes saw comes to the first
        config.pluginmanager.register(Outcomes(), "outcomes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    racing = [item for item in items if item.get_closest_marker("races")]
    for item in racing:
        item.add_marker(pytest.mark.flaky(reruns=1))
    if len({item.nodeid.partition("[")[0] for item in racing}) > MAY_RACE:
        raise pytest.UsageError(f"more than {MAY_RACE} tests have the marker `races`")

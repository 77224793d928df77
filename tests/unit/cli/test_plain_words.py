"""What the command says when something is wrong: one clear line, and what to do."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from tests.cases import rows
from tests.unit.cli.conftest import admin

NOBODY = "127.0.0.1:1"


def spawned(line: str) -> subprocess.CompletedProcess[str]:
    """Run the command by a shell, whose redirections are what is asked about."""
    script = line.replace("triton-adapter", f"{sys.executable} -m adapter")
    return subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


class TestOutputThatCannotBeWritten:
    @pytest.mark.parametrize("command", ["ps", "version", "healthcheck"])
    def test_a_closed_stdout_is_said(self, command):
        done = spawned(f"triton-adapter {command} >&-")
        assert (done.returncode, done.stderr) == (1, "triton-adapter: stdout is closed\n")

    @pytest.mark.parametrize("flags", ["", "-u "])
    def test_a_full_device_is_said(self, flags):
        done = spawned(f"{sys.executable} {flags}-m adapter version >/dev/full")
        assert done.returncode == 1
        assert done.stderr == (
            "triton-adapter: the output could not be written: No space left on device\n"
        )


class TestWrongAddresses:
    @pytest.mark.parametrize(
        ("argv", "flag"),
        [
            (["ps"], "admin"),
            (["healthcheck"], "admin"),
            (["drain", "--timeout=1"], "admin"),
            (["load", "a", "/a"], "http"),
            (["unload", "a"], "http"),
        ],
    )
    def test_hint_has_flags_of_command_alone(self, run, argv, flag):
        code, out, err = run(*argv, f"--{flag}={NOBODY}")
        said = (out + err).splitlines()
        assert code == 1
        assert said == [
            f"triton-adapter: http://{NOBODY}: Connection refused",
            f"  is an adapter running there? --config, --{flag} or --url say where it is",
        ]

    @pytest.mark.parametrize("argv", [["load", "a", "/a"], ["unload", "a"]])
    def test_answer_of_stranger_names_flags_of_listener(self, run, sidecar, argv):
        server = sidecar(404)
        at = f"127.0.0.1:{server.server_port}"
        code, _, err = run(*argv, f"--http={at}", "--admin=off")
        assert code == 1
        assert f"http://{at} is not the listener `http` of an adapter" in err
        assert "--http or --url say where that is" in err


class TestWords:
    def test_probe_says_reason_and_not_json_around_it(self, run, sidecar):
        server = sidecar(503)
        server.body = b'{"error": "3 requests are left", "code": "Draining"}'
        code, _, err = run("drain", "--timeout=18", environ=admin(server))
        assert code == 1
        at = f"http://127.0.0.1:{server.server_port}"
        assert err == f"triton-adapter: {at}/drain: 503 3 requests are left\n"

    def test_setting_that_is_a_list_is_in_words(self, run, tmp_path):
        (file := tmp_path / "a.yaml").write_text("model_roots: 5\n")
        code, _, err = run("check-config", "--config", str(file))
        assert (code, err) == (
            2,
            f"triton-adapter: file {file}, key model_roots: 5: write a list\n",
        )

    @pytest.mark.parametrize("word", ["x", "0", "inf"])
    def test_duration_that_is_none_is_said_in_words(self, run, word):
        code, _, err = run("ps", f"--watch={word}")
        assert code == 2
        assert f"{word} is not a number of seconds above 0" in err

    @rows(
        ("word", "meant"),
        [
            ("ls", "list"),
            ("status", "ps"),
            ("run", "load"),
            ("start", "serve"),
            ("stop", "unload"),
            ("rm", "unload"),
            ("memory", "ps"),
        ],
    )
    def test_words_of_other_tools_are_translated(self, run, word, meant):
        code, _, err = run(word)
        assert code == 2
        assert f"there is no command {word!r}; did you mean {meant}?" in err

    def test_logs_are_said_to_be_elsewhere(self, run):
        code, _, err = run("logs")
        assert code == 2
        assert "there is no command 'logs': the log is what `serve` writes to stdout" in err


def _model(name: str) -> dict[str, object]:
    return {
        "model_id": name,
        "state": "READY",
        "state_seconds": 1.0,
        "bytes": {"host": 1},
        "basis": "disk",
        "in_flight": 0,
        "idle_seconds": None,
        "waits_for": None,
        "hanging_seconds": None,
        "awaits": [],
        "is_pinned": False,
        "gpu": None,
        "served": 0,
    }


def _failure(name: str, age_seconds: float) -> dict[str, object]:
    time = datetime.now(UTC) - timedelta(seconds=age_seconds)
    return {
        "model_id": name,
        "time": time.isoformat(),
        "operation": "load",
        "code": "InvalidModel",
        "reason": "no",
        "count": 1,
        "is_mended": False,
    }


class TestSeveralModels:
    @pytest.fixture
    def ps(self, run, sidecar):
        """`ps` of an adapter with the models `one`, `two` and `three`."""

        def ps(*argv, failures=()):
            server = sidecar(200)
            models = [_model(name) for name in ("one", "two", "three")]
            state = {"models": models, "on_demand": None, "forgotten": [], "failures": failures}
            server.body = json.dumps({**state, "memory": {"devices": {}}}).encode()
            return run("ps", *argv, environ=admin(server))

        return ps

    def test_ps_lists_those_that_are_named(self, ps):
        code, out, _ = ps("one", "three")
        assert code == 0
        models = out.partition("\n\n")[2].splitlines()
        assert [line.split()[0] for line in models] == ["NAME", "one", "three"]

    def test_ps_of_none_that_is_loaded_is_1(self, ps):
        assert ps("four") == (1, "", "triton-adapter: no model 'four' is loaded\n")

    def test_old_failures_stay_in_the_json_alone(self, ps):
        failures = [_failure("late", 5), _failure("early", 700)]
        _, out, _ = ps(failures=failures)
        assert "late" in out
        assert "early" not in out
        assert json.loads(ps("--json", failures=failures)[1])["failures"] == failures
        assert "failed" not in ps(failures=failures[1:])[1]

    def test_newest_memory_failure_is_listed(self, ps):
        lacks = [
            _failure(name, age) | {"code": "OutOfMemory"} for name, age in [("x", 6), ("y", 7)]
        ]
        _, out, _ = ps(failures=[*(_failure(f"m{n}", n) for n in range(6)), *lacks])
        rows = [line.split()[3] for line in out.partition("that failed:\n")[2].splitlines()]
        assert rows == ["m0", "m1", "m2", "m3", "x"]

    def test_several_models_are_unloaded_despite_an_absent(self, run, sidecar):
        server = sidecar(404, 200)
        server.body = b"{}"
        at = f"--http=127.0.0.1:{server.server_port}"
        code, out, _ = run("unload", "a", "b", at, "--admin=off")
        assert (code, server.asked[0], server.asked[-1]) == (
            1,
            "DELETE /models/a",
            "DELETE /models/b",
        )
        assert out.startswith("b is unloaded after")


class TestHints:
    def test_a_refusal_names_the_flag_that_helps(self, run, sidecar):
        reason = 'a holds several models: name it as "entry" in the load request'
        server = sidecar(400)
        server.body = json.dumps({"error": reason, "code": "InvalidRequest"}).encode()
        at = f"--http=127.0.0.1:{server.server_port}"
        _, _, err = run("load", "a", "/a", at, "--admin=off")
        assert "--entry=MODEL" in err.splitlines()[1]

    @pytest.mark.parametrize(("source", "is_here"), [("none", False), (".", True)])
    def test_refused_path_absent_here_is_reported(self, run, sidecar, source, is_here):
        server = sidecar(400)
        server.body = b'{"error": "url /x is outside the model roots", "code": "InvalidRequest"}'
        at = f"--http=127.0.0.1:{server.server_port}"
        _, _, err = run("load", "a", source, at, "--admin=off")
        assert ("is not on this machine either" not in err) is is_here


class TestJson:
    def test_commands_error_is_one_json_line(self, run):
        code, out, err = run("ps", "--json", f"--admin={NOBODY}")
        assert (code, out) == (1, "")
        assert json.loads(err) == {
            "error": f"http://{NOBODY}: Connection refused",
            "hint": "is an adapter running there? --config, --admin or --url say where it is",
        }

    def test_what_no_adapter_says_is_json_too(self, run, sidecar):
        code, out, err = run("ps", "--json", environ=admin(sidecar(502)))
        assert (code, out) == (1, "")
        assert json.loads(err)["error"] == "502: status is 502"

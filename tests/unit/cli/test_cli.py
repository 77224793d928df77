"""What the commands print and how they exit."""

import argparse
import io
import json
import os
import subprocess
import sys

import pytest

import adapter.__main__
from adapter.cli import probes
from adapter.cli.client import find_target
from adapter.cli.commands import COMMANDS
from adapter.cli.parser import parse
from adapter.settings import GROUPS, SECRETS, Settings, flag_of, variable_of
from tests.cases import rows
from tests.trees import write_python_model
from tests.unit.cli.conftest import admin


class TestHelp:
    @rows("command", list(COMMANDS))
    def test_each_command_teaches_by_examples(self, run, command):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert out.split("examples:")[1].count(f"triton-adapter {command}") >= 2

    def test_the_schema_is_printed_as_json(self, run):
        code, out, _ = run("schema")
        assert code == 0
        assert "memory_limit" in json.loads(out)["properties"]

    @pytest.mark.parametrize("command", ["serve", "check-config"])
    def test_each_setting_is_flag_that_says_its_variable(self, run, command):
        words = run(command, "--help")[1].split()
        text = " ".join(words)
        for name in set(Settings.model_fields) - SECRETS:
            assert flag_of(name) in text
            assert variable_of(name) in text

    def test_the_command_alone_prints_the_help(self, run):
        assert run() == run("--help")
        assert run("help") == run("--help")
        assert run()[0] == 0

    @rows("command", [("serve",), ("check-config",), ("load", "m", "/m"), ("drain",)])
    @rows("words", [("--control-token=secret",), ("--control-token", "secret")])
    def test_token_is_no_flag_and_is_not_repeated(self, run, command, words):
        code, out, err = run(*command, *words)
        assert (code, out) == (2, "")
        assert "ADAPTER_CONTROL_TOKEN" in err
        assert "secret" not in err

    @rows(
        ("argv", "listeners"),
        [
            (("ps", "--http=127.0.0.1:9000"), "--admin"),
            (("drain", "--grpc", "127.0.0.1:9085"), "--admin"),
            (("wait", "--http=127.0.0.1:9000"), "--admin or --metrics"),
            (("load", "m", "/m", "--metrics=127.0.0.1:9000"), "--admin or --http"),
        ],
    )
    def test_listener_not_asked_is_refused_with_those_asked(self, run, argv, listeners):
        code, out, err = run(*argv)
        assert (code, out) == (2, "")
        assert f": {argv[0]} asks the listener of {listeners}: give that\n" in err

    @pytest.mark.parametrize(
        ("argv", "meant"),
        [
            (("serv",), "serve"),
            (("unlod", "m"), "unload"),
            (("help", "healthchek"), "healthcheck"),
            (("--versio",), "--version"),
            (("ps", "--wach"), "--watch"),
            (("serve", "--memory-limt=8GiB"), "--memory-limit"),
        ],
    )
    def test_misspelt_word_is_refused_with_the_nearest(self, run, argv, meant):
        code, out, err = run(*argv)
        assert (code, out) == (2, "")
        assert f"; did you mean {meant}?" in err

    @rows("command", list(COMMANDS))
    def test_a_usage_error_leaves_itself_on_the_screen(self, run, command):
        err = run(command, "--no-such-flag")[2]
        usage, error, hint = err.splitlines()
        assert usage.startswith(f"usage: triton-adapter {command} [OPTIONS]")
        assert error.startswith(f"triton-adapter {command}: ")
        assert hint == f"see: triton-adapter {command} --help"

    @pytest.mark.parametrize(
        ("command", "arguments"),
        [("unload", "NAME..."), ("ps", "[NAME...]"), ("load", "NAME SOURCE"), ("drain", "")],
    )
    def test_usage_shows_optional_and_repeated_words(self, run, command, arguments):
        usage = f"usage: triton-adapter {command} [OPTIONS] {arguments}".rstrip()
        for argv in ((command, "--help"), (command, "--no-such-flag")):
            assert usage in "".join(run(*argv)[1:]).splitlines()

    def test_settings_stand_in_groups_with_what_each_takes(self, run):
        out = run("serve", "--help")[1]
        titles = [line[:-1] for line in out.splitlines() if line.endswith(":") and line[0] != " "]
        assert titles == ["options", *GROUPS, "examples"]
        assert "VALUE" not in out
        for name, metavar in {
            "http": "HOST:PORT",
            "memory_limit": "SIZE",
            "max_body_bytes": "SIZE",
            "load_timeout_seconds": "SECONDS",
            "triton": "external|embedded",
            "model_roots": "FOLDER",
        }.items():
            assert f"  {flag_of(name)} {metavar}" in out

    @rows("command", list(COMMANDS))
    def test_the_names_of_products_keep_their_capitals(self, run, command):
        text = " ".join(run(command, "--help")[1].split())
        summary = COMMANDS[command].summary
        assert f"{summary[0].upper()}{summary[1:]}." in text
        assert "triton of" not in text


class TestCheckConfig:
    def test_each_setting_is_a_row_with_origin(self, run):
        flags = ("--memory-limit=8GiB", "--model-roots=/a", "--model-roots=/b", "--no-on-demand")
        code, out, err = run("check-config", *flags, environ={"ADAPTER_HTTP": "unix:/run/a.sock"})
        assert (code, err) == (0, "")
        rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()}
        assert list(rows) == list(Settings.model_fields)
        assert rows["http"].split("  ")[0] == "unix:/run/a.sock"
        assert rows["http"].endswith("  environment ADAPTER_HTTP")
        assert rows["memory_limit"].split() == ["8GiB", "flag", "--memory-limit"]
        assert rows["max_body_bytes"].startswith("2147483647 (2.0 GiB) ")
        assert rows["load_timeout_seconds"].startswith("350 s ")
        assert rows["cache_dir"].split(maxsplit=1)[0] == "-"
        assert rows["cache_dir"].endswith("default: triton-adapter in $XDG_CACHE_HOME or ~/.cache")
        assert rows["model_roots"].startswith("/a /b ")
        assert rows["on_demand"].startswith("false ")
        assert rows["on_demand"].endswith("  flag --on-demand")
        assert rows["repository"].startswith("/models/_triton_models ")

    def test_json_is_for_programs(self, run):
        code, out, _ = run("check-config", "--json", "--triton=embedded", "--admin=off")
        found = json.loads(out)
        assert code == 0
        assert list(found) == list(Settings.model_fields)
        assert found["admin"] == {"value": "off", "origin": "flag --admin"}
        assert found["memory_source"] == {"value": "auto", "origin": "default"}
        assert found["memory_limit"]["value"] is None
        assert found["model_roots"]["value"] == ["/opt/ml/models", "/models"]
        assert found["drain_timeout_seconds"]["value"] == 18
        assert found["on_demand"]["value"] is False

    def test_warnings_go_to_stderr(self, run):
        code, out, err = run("check-config", environ={"MAX_CONC_KERAS_CONV_PROCS": "2"})
        assert code == 0
        assert "MAX_CONC_KERAS_CONV_PROCS" in err
        assert "ADAPTER_PORT" not in out

    @pytest.mark.parametrize("command", ["check-config", "serve"])
    def test_bad_settings_exit_2_with_one_line_each(self, run, tmp_path, command):
        (file := tmp_path / "a.yaml").write_text("admin: 1\n")
        argv = (command, "--http=x", "--config", str(file))
        code, out, err = run(*argv, environ={"ADAPTER_HTPP": "1"})
        assert (code, out) == (2, "")
        said = [line.removeprefix("triton-adapter: ") for line in err.splitlines()]
        assert [line.split(":")[0] for line in said] == [
            "environment ADAPTER_HTPP",
            "flag --http",
            f"file {file}, key admin",
        ]


class TestHealthcheck:
    def test_ready_is_0_and_silent(self, run, sidecar):
        server = sidecar(200)
        assert run("healthcheck", environ=admin(server)) == (0, "", "")
        assert server.asked == ["/readyz"]

    def test_not_ready_is_1_and_prints_the_body(self, run, sidecar):
        code, out, _ = run("healthcheck", environ=admin(sidecar(503)))
        assert code == 1
        assert "503 status is 503" in out

    def test_url_is_asked_without_any_setting(self, run, sidecar):
        server = sidecar(200)
        url = f"http://127.0.0.1:{server.server_port}/livez"
        assert run("healthcheck", f"--url={url}", environ={"ADAPTER_ADMIN": "x"})[0] == 0
        assert server.asked == ["/livez"]

    def test_listener_in_file_system_is_asked_too(self, run, sidecar):
        server = sidecar(200, unix=True)
        listener = f"unix:{server.server_address}"
        assert run("healthcheck", environ={"ADAPTER_ADMIN": listener})[0] == 0
        assert run("healthcheck", f"--url={listener}")[0] == 0
        assert server.asked == ["/readyz", "/readyz"]

    def test_a_url_without_a_path_means_readyz(self, run, sidecar):
        server = sidecar(200)
        url = f"http://127.0.0.1:{server.server_port}"
        assert run("healthcheck", f"--url={url}")[0] == 0
        assert run("healthcheck", f"--url={url}/")[0] == 0
        assert server.asked == ["/readyz", "/readyz"]

    def test_nobody_there_is_1(self, run, tmp_path):
        code, out, _ = run("healthcheck", f"--url=unix:{tmp_path}/none.sock")
        assert code == 1
        assert "No such file" in out

    @pytest.mark.parametrize("listener", ["off", "127.0.0.1:0"])
    def test_listener_that_cannot_be_asked_is_bad_setting(self, run, listener):
        code, _, err = run("healthcheck", environ={"ADAPTER_ADMIN": listener})
        assert code == 2
        assert "--url" in err

    @pytest.mark.parametrize(
        "url", ["https://a/", "http:", "unix:", "http://a:99999/", "http://a:0/", "a:80", ""]
    )
    def test_url_that_cannot_be_asked_is_bad_flag(self, run, url):
        code, _, err = run("healthcheck", f"--url={url}")
        assert code == 2
        assert err.startswith(f"triton-adapter: flag --url: {url!r}: ")

    @pytest.mark.parametrize(
        ("listens", "asked"),
        [
            ("0.0.0.0:1", "http://127.0.0.1:1"),
            ("[::]:1", "http://127.0.0.1:1"),
            ("10.0.0.1:1", "http://10.0.0.1:1"),
        ],
    )
    def test_every_address_is_asked_at_the_loopback_one(self, listens, asked):
        args = argparse.Namespace(url=None, admin=listens, config=None)
        assert str(find_target(args, {}, "admin")) == asked


class TestDrain:
    def test_it_is_asked_for_with_limit_of_settings(self, run, sidecar):
        server = sidecar(200)
        environ = admin(server) | {"ADAPTER_DRAIN_TIMEOUT_SECONDS": "7"}
        assert run("drain", environ=environ) == (0, "", "")
        assert server.asked == ["POST /drain?timeout=7.000000"]

    def test_a_limit_of_its_own_wins(self, run, sidecar):
        server = sidecar(200)
        url = f"http://127.0.0.1:{server.server_port}/drain"
        assert run("drain", f"--url={url}", "--timeout=0.5") == (0, "", "")
        assert server.asked == ["POST /drain?timeout=0.500000"]

    def test_the_path_of_a_url_is_asked(self, run, sidecar):
        server = sidecar(200)
        url = f"http://127.0.0.1:{server.server_port}/adapters/7/drain"
        assert run("drain", f"--url={url}", "--timeout=1") == (0, "", "")
        assert server.asked == ["POST /adapters/7/drain?timeout=1.000000"]

    @pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
    def test_limit_that_is_none_is_usage_error(self, run, seconds):
        assert run("drain", f"--timeout={seconds}")[0] == 2


class TestWait:
    def test_it_ends_when_the_sidecar_gets_ready(self, run, sidecar):
        server = sidecar(503, 503, 200)
        assert run("wait", environ=admin(server)) == (0, "", "")
        assert len(server.asked) == 3

    def test_wait_ends_with_the_last_answer(self, run, sidecar):
        server = sidecar(503)
        code, out, err = run("wait", "--timeout=0.15", environ=admin(server))
        assert (code, out) == (1, "")
        assert "not ready after 0.15 s" in err
        assert "503 status is 503" in err
        assert 1 <= len(server.asked) <= 3

    @pytest.mark.parametrize("status", [404, 405])
    def test_wait_fails_at_once_on_unknown_path(self, run, sidecar, status):
        server = sidecar(status)
        code, _, err = run("wait", environ=admin(server))
        assert (code, len(server.asked)) == (1, 1)
        assert f"{status} status is {status}" in err
        assert "--admin" in err

    def test_wait_reports_its_reason_at_intervals(self, run, sidecar, monkeypatch):
        monkeypatch.setattr(probes, "_REPORT_SECONDS", 0.0)
        code, _, err = run("wait", environ=admin(sidecar(503, 503, 200)))
        assert code == 0
        assert [line.split(": ", 2)[1] for line in err.splitlines()] == ["waiting since 0 s"] * 2
        assert "503 status is 503" in err


class TestVersion:
    def test_version_is_one_line_and_all_is_more(self, run):
        name, number = run("version")[1].split(" ")
        assert (name, number[-1]) == ("triton-adapter", "\n")
        everything = run("version", "--all")[1]
        assert "\ngrpcio " in everything
        assert f"\npython {sys.version.split()[0]}\n" in everything


@pytest.mark.parametrize(
    ("argv", "code"), [(["version"], 0), (["healthcheck", "--url=unix:/nowhere.sock"], 1)]
)
def test_small_commands_import_nothing_heavy(argv, code):
    script = (
        "import sys; from adapter.cli.main import main; code = main(sys.argv[1:], {}); "
        "heavy = {'pydantic', 'yaml', 'aiohttp', 'grpc', 'asyncio'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *argv],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(("argv", "unbuffered"), [(("--help",), ""), (("version",), "1")])
def test_reader_who_has_left_ends_command_quietly(argv, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "adapter", *argv],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 1 or argv == ("--help",)  # argparse does not mind


def test_letters_that_terminal_does_not_have_are_escaped(tmp_path, monkeypatch):
    folder = write_python_model(tmp_path / "модель")
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="latin-1") for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(sys, "argv", ["triton-adapter", "inspect", str(folder)])
    assert adapter.__main__.main() == 0
    out.flush()
    assert b"name      \\u043c\\u043e" in out.buffer.getvalue()
    assert err.buffer.getvalue() == b""


@pytest.mark.slow
def test_serve_imports_nothing_that_only_a_client_needs():
    script = (
        "import sys; import adapter.app; from adapter.cli.serve import COMMANDS; "
        "print(sorted({'rich', 'shtab', 'adapter.cli.client'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "adapter", "no-such-command"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={})
    assert done.returncode == 2
    assert "triton-adapter: there is no command 'no-such-command'\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "load digits FILE --entry=LABEL",
        "load digits --entry=LABEL FILE",
        "load --entry LABEL digits --json FILE",
        "load digits FILE --entry LABEL --http=127.0.0.1:1",
    ],
)
def test_options_may_stand_before_between_and_behind_words(words):
    args = parse(words.split())
    assert (args.command, args.name, args.source, args.entry) == (
        *("load", "digits", "FILE", "LABEL"),
    )

"""What the commands print and how they exit."""

import json
import socketserver
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from adapter import cli
from adapter.cli.commands import COMMANDS
from adapter.settings import Settings, flag_of, masked, variable_of


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--memory-limt=8GiB", "--memory-limt=8GiB; did you mean --memory-limit?"),
        ("--http-adress", "--http-adress"),
        ("--no-such-thing-at-all", "--no-such-thing-at-all\n"),
    ],
)
def test_a_misspelt_flag_is_refused_with_the_name_that_may_have_been_meant(flag, said, capsys):
    assert cli.main(["serve", flag], {}) == 2
    assert f"unrecognized arguments: {said}" in capsys.readouterr().err


class Answers(BaseHTTPRequestHandler):
    """Gives the server's answers one after another, the last of them for ever."""

    def do_POST(self) -> None:
        self._answer(f"POST {self.path}")

    def do_GET(self) -> None:
        self._answer(self.path)

    def _answer(self, asked: str) -> None:
        self.server.asked.append(asked)
        left = self.server.statuses
        status = left.pop(0) if len(left) > 1 else left[0]
        body = f"status is {status}".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


class UnixHTTPServer(socketserver.UnixStreamServer):
    def get_request(self):
        request, _ = super().get_request()
        return request, ("unix", 0)


def serving(server, *statuses):
    server.statuses, server.asked = list(statuses), []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    return thread


@pytest.fixture
def sidecar(tmp_path):
    """Starts a pretended admin listener that answers so; gives the server."""
    started = []

    def start(*statuses, unix=False):
        if unix:
            server = UnixHTTPServer(str(tmp_path / "admin.sock"), Answers)
        else:
            server = HTTPServer(("127.0.0.1", 0), Answers)
        started.append((server, serving(server, *statuses)))
        return server

    yield start
    for server, thread in started:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def run(capsys):
    def run_command(*argv, environ=None):
        code = cli.main(argv, environ or {})
        out, err = capsys.readouterr()
        return code, out, err

    return run_command


def admin(server) -> dict[str, str]:
    """The settings of a sidecar whose admin listener that is, as it would be given to listen."""
    return {"ADAPTER_ADMIN": f"0.0.0.0:{server.server_port}"}


class TestHelp:
    def test_the_command_line_teaches_itself(self, run):
        code, out, _ = run("--help")
        assert code == 0
        assert "exit codes: 0 done; 2 bad settings; 1 anything else" in out

    @pytest.mark.parametrize("command", list(COMMANDS))
    def test_each_command_teaches_by_examples(self, run, command):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert out.split("examples:")[1].count(f"triton-adapter {command}") >= 2

    @pytest.mark.parametrize("command", ["serve", "demo", "check-config"])
    def test_each_setting_is_a_flag_that_says_its_variable(self, run, command):
        words = run(command, "--help")[1].split()
        text = " ".join(words)
        for name in Settings.model_fields:
            assert f"{flag_of(name)} " in text
            assert variable_of(name) in text

    @pytest.mark.parametrize(
        "argv", [(), ("sing",), ("serve", "--htt=off"), ("version", "--http=1")]
    )
    def test_a_usage_error_exits_2(self, run, argv):
        code, out, err = run(*argv)
        assert (code, out) == (2, "")
        assert "usage:" in err


class TestCheckConfig:
    def test_every_setting_is_a_row_with_its_value_and_origin(self, run):
        flags = ("--memory-limit=8GiB", "--model-roots=/a", "--model-roots=/b", "--no-examples")
        code, out, err = run("check-config", *flags, environ={"ADAPTER_HTTP": "unix:/run/a.sock"})
        assert (code, err) == (0, "")
        rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines()}
        assert list(rows) == list(Settings.model_fields)
        assert rows["http"].split("  ")[0] == "unix:/run/a.sock"
        assert rows["http"].endswith("  environment ADAPTER_HTTP")
        assert rows["memory_limit"].startswith("8589934592 ")
        assert rows["model_roots"].startswith("/a /b ")
        assert rows["examples"].startswith("false ")
        assert rows["examples"].endswith("  flag --examples")
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
        assert found["examples"]["value"] is False

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
        assert [line.split(":")[0] for line in err.splitlines()] == [
            "environment ADAPTER_HTPP",
            "flag --http",
            f"file {file}, key admin",
        ]

    def test_secrets_are_masked_where_there_are_any(self):
        assert masked("admin_token", "abc") == "***"
        assert masked("admin_token", None) is None
        assert masked("http", "abc") == "abc"


class TestHealthcheck:
    def test_ready_is_0_and_silent(self, run, sidecar):
        server = sidecar(200)
        assert run("healthcheck", environ=admin(server)) == (0, "", "")
        assert server.asked == ["/readyz"]

    def test_not_ready_is_1_and_prints_the_body(self, run, sidecar):
        code, out, _ = run("healthcheck", environ=admin(sidecar(503)))
        assert code == 1
        assert "503 status is 503" in out

    def test_a_url_is_asked_as_it_is_and_no_setting_is_looked_at(self, run, sidecar):
        server = sidecar(200)
        url = f"http://127.0.0.1:{server.server_port}/livez"
        assert run("healthcheck", f"--url={url}", environ={"ADAPTER_ADMIN": "x"})[0] == 0
        assert server.asked == ["/livez"]

    def test_a_listener_in_the_file_system_is_asked_too(self, run, sidecar):
        server = sidecar(200, unix=True)
        listener = f"unix:{server.server_address}"
        assert run("healthcheck", environ={"ADAPTER_ADMIN": listener})[0] == 0
        assert run("healthcheck", f"--url={listener}")[0] == 0
        assert server.asked == ["/readyz", "/readyz"]

    def test_nobody_there_is_1(self, run, tmp_path):
        code, out, _ = run("healthcheck", f"--url=unix:{tmp_path}/none.sock")
        assert code == 1
        assert "No such file" in out

    @pytest.mark.parametrize("listener", ["off", "127.0.0.1:0"])
    def test_a_listener_that_cannot_be_asked_is_a_bad_setting(self, run, listener):
        code, _, err = run("healthcheck", environ={"ADAPTER_ADMIN": listener})
        assert code == 2
        assert "--url" in err

    @pytest.mark.parametrize(
        "url", ["https://a/", "http:", "unix:", "http://a:99999/", "http://a:0/", "a:80", ""]
    )
    def test_a_url_that_cannot_be_asked_is_a_bad_flag(self, run, url):
        code, _, err = run("healthcheck", f"--url={url}")
        assert code == 2
        assert err.startswith(f"flag --url: {url!r}: ")

    @pytest.mark.parametrize(
        ("listens", "asked"),
        [
            ("0.0.0.0:1", "http://127.0.0.1:1/readyz"),
            ("[::]:1", "http://[::1]:1/readyz"),
            ("10.0.0.1:1", "http://10.0.0.1:1/readyz"),
        ],
    )
    def test_every_address_is_asked_at_the_loopback_one(self, listens, asked):
        listener = Settings(admin=listens).admin
        assert cli._ready_url(listener) == asked


class TestDrain:
    def test_it_is_asked_for_with_the_limit_of_the_settings(self, run, sidecar):
        server = sidecar(200)
        environ = admin(server) | {"ADAPTER_DRAIN_TIMEOUT_SECONDS": "7"}
        assert run("drain", environ=environ) == (0, "", "")
        assert server.asked == ["POST /drain?timeout=7.000000"]

    def test_a_limit_of_its_own_wins(self, run, sidecar):
        server = sidecar(200)
        url = f"http://127.0.0.1:{server.server_port}/drain"
        assert run("drain", f"--url={url}", "--timeout=0.5") == (0, "", "")
        assert server.asked == ["POST /drain?timeout=0.500000"]

    def test_a_listener_in_the_file_system_is_asked_too(self, run, sidecar):
        server = sidecar(200, unix=True)
        assert run("drain", f"--url=unix:{server.server_address}", "--timeout=1")[0] == 0
        assert server.asked == ["POST /drain?timeout=1.000000"]

    def test_what_is_left_is_1_and_printed(self, run, sidecar):
        code, _, err = run("drain", environ=admin(sidecar(503)))
        assert code == 1
        assert "503 status is 503" in err

    @pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
    def test_a_limit_that_is_none_is_a_usage_error(self, run, seconds):
        assert run("drain", f"--timeout={seconds}")[0] == 2


class TestWait:
    def test_it_ends_when_the_sidecar_gets_ready(self, run, sidecar):
        server = sidecar(503, 503, 200)
        assert run("wait", environ=admin(server)) == (0, "", "")
        assert len(server.asked) == 3

    def test_it_gives_up_and_says_what_was_answered_last(self, run, sidecar):
        server = sidecar(503)
        code, out, err = run("wait", "--timeout=0.15", environ=admin(server))
        assert (code, out) == (1, "")
        assert "not ready after 0.15 s" in err
        assert "503 status is 503" in err
        assert 1 <= len(server.asked) <= 3


class TestVersion:
    def test_version_is_one_line_and_all_is_more(self, run):
        assert run("version")[1].startswith("triton-adapter ")
        assert run("version")[1].count("\n") == 1
        everything = run("version", "--all")[1]
        assert "\ngrpcio " in everything
        assert f"\npython {sys.version.split()[0]}\n" in everything


@pytest.mark.parametrize(
    ("argv", "code"), [(["version"], 0), (["healthcheck", "--url=unix:/nowhere.sock"], 1)]
)
def test_small_commands_import_nothing_heavy(argv, code):
    script = (
        "import sys; from adapter import cli; code = cli.main(sys.argv[1:], {}); "
        "heavy = {'pydantic', 'yaml', 'aiohttp', 'grpc', 'asyncio'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *argv],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, "")


def test_the_module_is_the_command(tmp_path):
    command = [sys.executable, "-m", "adapter", "check-config", "--http=x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env={})
    assert done.returncode == 2
    assert done.stderr.startswith("flag --http: 'x': ")
    assert "Traceback" not in done.stderr

"""`triton-adapter ps`, `load` and `unload` at a real adapter, in pipes."""

import json
import re
import subprocess

import pytest

from tests.journeys.client.conftest import LIMIT
from tests.journeys.client.terminal import COMMAND, ESCAPE, run
from tests.running import COMPLETE, EXAMPLES, embedded_adapter
from tests.trees import write_python_model

pytestmark = pytest.mark.triton


@pytest.fixture
def command(environ):
    """Runs it with the settings of the adapter; gives exit code, stdout and stderr."""

    def command(*argv, stdin=b"", folder=None):
        done = run(*argv, environ=environ, stdin=stdin, folder=folder)
        assert b"Traceback" not in done.stderr
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    return command


def table(text: str) -> list[list[str]]:
    """Return the rows of the models, by the two blanks between columns."""
    lines = text.split("\n\n")[1].splitlines()
    return [re.split(r" {2,}", line) for line in lines]


def test_a_model_is_loaded_listed_and_unloaded(command, packages):
    code, out, _ = command("load", "echo", str(packages / "echo"))
    assert code == 0
    assert re.fullmatch(r"echo is loaded after \d+\.\d s and takes .+ \(measured\)\n", out)

    code, out, _ = command("ps")
    head, row = table(out)
    assert code == 0
    assert head == ["NAME", "STATE", "SIZE", "BASIS", "IN FLIGHT", "IDLE", "LOADED FOR"]
    assert row[:2] == ["echo", "READY"]
    assert row[3:5] == ["measured", "0"]

    code, out, _ = command("unload", "echo")
    assert code == 0
    assert re.fullmatch(r"echo is unloaded after \d+\.\d s\n", out)
    assert table(command("ps")[1]) == [head]


def test_odd_package_is_described_at_its_load(command, packages):
    (write_python_model(packages / "odd") / "config.pbtxt").rename(packages / "odd" / "config.pbtx")
    code, out, err = command("load", "odd", str(packages / "odd"))
    assert (code, out[:13]) == (0, "odd is loaded")
    told = [line for line in err.splitlines() if not line.startswith("load odd: ")]  # its progress
    assert told[0].startswith("warning: ")
    assert "config.pbtx " in err


def test_relative_path_is_the_commands(command, packages):
    assert command("load", "echo", "echo", folder=packages)[0] == 0
    code, _, err = command("load", "other", "missing", folder=packages)
    assert code == 1
    assert f"404 SourceMissing: url {packages}/missing does not exist" in err


def test_what_goes_to_a_pipe_is_plain(command, packages):
    command("load", "echo", str(packages / "echo"))
    command("load", "broken", str(packages / "broken"))
    for argv in (("ps",), ("load", "echo", "/nowhere"), ("--help",)):
        assert ESCAPE not in "".join(command(*argv)[1:])


# -- failures -----------------------------------------------------------------------------------


def test_load_without_room_shows_figures_and_advice(command):
    assert command("load", "one", str(EXAMPLES / "hungry"))[0] == 0
    code, out, err = command("load", "two", str(EXAMPLES / "hungry"))
    assert (code, out) == (1, "")
    lines = err.splitlines()
    assert lines[0].startswith("triton-adapter: 507 InsufficientMemory: model 'two' needs ")
    figures = dict(line.split(maxsplit=1) for line in lines[1:5])
    assert list(figures) == ["needed", "free", "limit", "device"]
    assert figures["limit"] == f"1.0 GiB ({LIMIT})"
    assert figures["device"] == "host"
    assert "triton-adapter unload NAME" in lines[5]

    code, out, err = command("load", "two", str(EXAMPLES / "hungry"), "--json")
    assert (code, err) == (1, "")
    assert json.loads(out)["limit_bytes"] == LIMIT


def test_failed_loads_reason_stays_in_ps(command, packages):
    code, _, err = command("load", "broken", str(packages / "broken"))
    assert code == 1
    assert "weights are missing" in err
    assert "triton-adapter inspect" in err

    _, out, _ = command("ps")
    last = out.split("the last loads, unloads and fetches that failed:\n")[1].splitlines()[0]
    assert re.match(r"\d+s ago +load +broken .*InvalidModel: .*weights are missing", last)
    failed = json.loads(command("ps", "--json")[1])["failures"][0]
    assert (failed["model_id"], failed["code"]) == ("broken", "InvalidModel")


def test_absent_model_exits_with_1_and_hint(command):
    code, out, err = command("unload", "none")
    assert (code, out) == (1, "")
    assert "404 ModelNotFound: model 'none' is not loaded" in err
    assert "triton-adapter load NAME SOURCE" in err


@pytest.mark.parametrize("argv", [("ps",), ("load", "m", "/m"), ("unload", "m")])
def test_nobody_there_is_1_with_a_hint(argv):
    nobody = "127.0.0.1:1"
    done = run(*argv, environ={"ADAPTER_HTTP": nobody, "ADAPTER_ADMIN": nobody})
    assert (done.returncode, done.stdout) == (1, b"")
    said, hint = done.stderr.decode().splitlines()
    assert said == f"triton-adapter: http://{nobody}: Connection refused"
    assert "--url" in hint


@pytest.mark.parametrize("argv", [("ps",), ("list",), ("show", "m"), ("forget", "m")])
def test_http_listener_is_not_taken_for_admin(command, adapter, argv):
    code, _, err = command(*argv, f"--url=http://{adapter.http}")
    assert code == 1
    assert f"http://{adapter.http} is not the listener `admin` of an adapter" in err


def test_wrong_listener_is_recognized(command, adapter):
    code, _, err = command("unload", "m", f"--url=http://{adapter.admin}")
    assert code == 1
    assert f"http://{adapter.admin} is not the listener `http` of an adapter" in err
    code, _, err = command("ps", f"--url=http://{adapter.grpc}")
    assert code == 1
    assert f"http://{adapter.grpc}: no listener of HTTP/1.1" in err


# -- what is under way --------------------------------------------------------------------------


def test_a_load_says_what_it_waits_for(command, environ, adapter, packages):
    loading = subprocess.Popen(
        [*COMMAND, "load", "slow", str(packages / "slow")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )
    # on a busy machine it waits for other things before that, and after it
    while (line := loading.stderr.readline()) != "load slow: waiting for Triton\n":
        assert line.startswith("load slow: ")
    (row,) = table(command("ps")[1])[1:]
    assert re.fullmatch(r"LOADING \d+s, waiting for Triton", row[1])
    assert row[5:] == ["-", "-"]
    (model,) = json.loads(command("ps", "--json")[1])["models"]
    assert (model["state"], model["waits_for"]) == ("LOADING", "triton")
    (packages / "go").touch()
    out, err = loading.communicate(timeout=60)
    assert loading.returncode == 0
    assert all(line.startswith("load slow: ") for line in err.splitlines())
    assert out.startswith("slow is loaded after ")


# -- devices, sockets, names --------------------------------------------------------------------


def test_ps_shows_device_memory_above_models(command):
    command("load", "one", str(EXAMPLES / "hungry"))
    code, out, _ = command("ps")
    head, row, blank, models, *_ = out.splitlines()
    assert (code, blank) == (0, "")
    assert head.split() == ["DEVICE", "USED", "FREE", "RESERVE", "LIMIT", "NOT", "ATTRIBUTED"]
    device, used, free, _, limit, _ = re.split(r" {2,}", row)
    assert (device, limit) == ("host", "1.0 GiB")
    assert used.endswith("MiB")
    assert free.endswith("MiB")
    assert models.startswith("NAME")
    memory = json.loads(command("ps", "--json")[1])["memory"]
    assert memory["devices"]["host"]["limit_bytes"] == LIMIT


def test_listeners_in_the_file_system_are_asked_too(tmp_path, packages):
    sockets = {name: f"unix:{tmp_path}/{name}.sock" for name in ("http", "admin")}
    flags = [f"--{name}={at}" for name, at in sockets.items()]
    with embedded_adapter(*flags, f"--model-roots={packages}", COMPLETE):
        environ = {f"ADAPTER_{name.upper()}": at for name, at in sockets.items()}
        assert run("load", "echo", str(packages / "echo"), environ=environ).returncode == 0
        assert b"echo  READY" in run("ps", f"--url={sockets['admin']}", environ={}).stdout
        done = run("unload", "echo", f"--url={sockets['http']}", environ={})
        assert (done.returncode, done.stderr) == (0, b"")


def test_unprintable_name_is_escaped(command, packages):
    name = "two\nlines\x1b[2J"
    assert command("load", name, str(packages / "echo"))[0] == 0
    assert "two\\nlines\\x1b[2J  READY" in command("ps")[1]
    code, out, _ = command("unload", name)
    assert (code, out.count("\n")) == (0, 1)


def test_the_settings_file_says_where_the_adapter_is(adapter, tmp_path):
    (file := tmp_path / "adapter.yaml").write_text(f"admin: {adapter.admin}\n")
    assert run("ps", f"--config={file}", environ={}).returncode == 0
    assert run("ps", f"--admin={adapter.admin}", environ={}).returncode == 0

"""`triton-adapter ps`, `load`, `unload`, `invoke` and `memory` at a real adapter, in pipes."""

import json
import re
import struct
import subprocess

import pytest

from tests.journeys.client.conftest import LIMIT
from tests.journeys.client.terminal import COMMAND, ESCAPE, run
from tests.running import COMPLETE, EXAMPLES, embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton
BODY = json.dumps(infer_body(1, 2, 4)).encode()


@pytest.fixture
def command(environ):
    """Runs it with the settings of the adapter; gives exit code, stdout and stderr."""

    def command(*argv, stdin=b"", folder=None):
        done = run(*argv, environ=environ, stdin=stdin, folder=folder)
        assert b"Traceback" not in done.stderr
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    return command


def table(text: str) -> list[list[str]]:
    """The rows of the first table, by the two blanks between columns."""
    return [re.split(r" {2,}", line) for line in text.split("\n\n", maxsplit=1)[0].splitlines()]


def test_a_model_is_loaded_listed_invoked_and_unloaded(command, packages):
    code, out, _ = command("load", "echo", str(packages / "echo"))
    assert code == 0
    assert re.fullmatch(r"echo is loaded after \d+\.\d s and takes .+ \(measured\)\n", out)

    code, out, _ = command("ps")
    head, row = table(out)
    assert code == 0
    assert head == ["NAME", "STATE", "SIZE", "BASIS", "IN FLIGHT", "IDLE", "LOADED FOR"]
    assert row[:2] == ["echo", "READY"]
    assert row[3:5] == ["measured", "0"]

    code, out, _ = command("invoke", "echo", stdin=BODY)
    assert code == 0
    assert json.loads(out)["outputs"][0]["data"] == [1, 2, 4]

    code, out, _ = command("unload", "echo")
    assert code == 0
    assert re.fullmatch(r"echo is unloaded after \d+\.\d s\n", out)
    assert table(command("ps")[1]) == [head]


def test_what_is_odd_in_a_package_is_said_where_it_is_loaded(command, packages):
    (write_python_model(packages / "odd") / "config.pbtxt").rename(packages / "odd" / "config.pbtx")
    code, out, err = command("load", "odd", str(packages / "odd"))
    assert (code, out[:13]) == (0, "odd is loaded")
    told = [line for line in err.splitlines() if not line.startswith("load odd: ")]  # its progress
    assert told[0].startswith("warning: ")
    assert "config.pbtx " in err


def test_a_model_of_a_store_is_invoked_by_its_name(tmp_path):
    write_python_model(tmp_path / "store" / "double")
    flags = (f"--model-store={tmp_path / 'store'}", f"--cache-dir={tmp_path / 'cache'}")
    with embedded_adapter(*flags, "--on-demand", COMPLETE) as adapter:
        environ = {"ADAPTER_HTTP": adapter.http, "ADAPTER_ADMIN": adapter.admin}
        done = run("invoke", "double", environ=environ, stdin=BODY)
        assert json.loads(done.stdout)["outputs"][0]["data"] == [1, 2, 4]
        done = run("invoke", "triple", environ=environ, stdin=BODY)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"404" in done.stderr
    assert b"in the store there is no such key: triple" in done.stderr


def test_a_path_is_meant_from_where_the_command_runs(command, packages):
    assert command("load", "echo", "echo", folder=packages)[0] == 0
    code, _, err = command("load", "other", "missing", folder=packages)
    assert code == 1
    assert f"404 SourceMissing: url {packages}/missing does not exist" in err


def test_what_goes_to_a_pipe_is_plain(command, packages):
    command("load", "echo", str(packages / "echo"))
    command("load", "broken", str(packages / "broken"))
    for argv in (("ps",), ("memory",), ("load", "echo", "/nowhere"), ("--help",)):
        assert ESCAPE not in "".join(command(*argv)[1:])


# -- failures -----------------------------------------------------------------------------------


def test_a_load_without_room_shows_its_figures_and_what_to_do(command):
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


def test_the_reason_of_a_failed_load_is_shown_and_stays_in_ps(command, packages):
    code, _, err = command("load", "broken", str(packages / "broken"))
    assert code == 1
    assert "weights are missing" in err
    assert "triton-adapter inspect" in err

    _, out, _ = command("ps")
    last = out.split("the last loads, unloads and fetches that failed:\n")[1].splitlines()[0]
    assert re.match(r"\d+s ago +load +broken +InvalidModel: .*weights are missing", last)
    failed = json.loads(command("ps", "--json")[1])["failures"][0]
    assert (failed["model_id"], failed["code"]) == ("broken", "InvalidModel")


@pytest.mark.parametrize("argv", [("unload", "none"), ("invoke", "none")])
def test_a_model_that_is_not_loaded_is_1_with_a_hint(command, argv):
    code, out, err = command(*argv, stdin=BODY)
    assert (code, out) == (1, "")
    assert "404 ModelNotFound: model 'none' is not loaded" in err
    assert "triton-adapter load NAME SOURCE" in err


@pytest.mark.parametrize(
    "argv", [("ps",), ("memory",), ("load", "m", "/m"), ("unload", "m"), ("invoke", "m")]
)
def test_nobody_there_is_1_with_a_hint(argv):
    nobody = "127.0.0.1:1"
    done = run(*argv, environ={"ADAPTER_HTTP": nobody, "ADAPTER_ADMIN": nobody})
    assert (done.returncode, done.stdout) == (1, b"")
    said, hint = done.stderr.decode().splitlines()
    assert said == f"triton-adapter: http://{nobody}: Connection refused"
    assert "--url" in hint


def test_the_wrong_listener_is_told_from_the_right_one(command, adapter):
    code, _, err = command("ps", f"--url=http://{adapter.http}")
    assert code == 1
    assert "only the admin listener tells this" in err
    code, _, err = command("unload", "m", f"--url=http://{adapter.admin}")
    assert code == 1
    assert f"http://{adapter.admin} is an adapter's admin listener" in err
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


# -- invoke -------------------------------------------------------------------------------------


@pytest.fixture
def echo(command, packages):
    assert command("load", "echo", str(packages / "echo"))[0] == 0


def request_of(**output):
    return json.dumps({**infer_body(1, 2, 4), "outputs": [{"name": "OUT", **output}]}).encode()


BINARY = {"parameters": {"binary_data": True}}
RAW = struct.pack("<3f", 1, 2, 4)


@pytest.mark.parametrize("argv", [(), ("-",), ("{file}",)])
def test_a_request_comes_from_a_file_or_from_stdin(command, echo, tmp_path, argv):
    (file := tmp_path / "request.json").write_bytes(BODY)
    argv = [each.format(file=file) for each in argv]
    code, out, _ = command("invoke", "echo", *argv, stdin=b"" if argv == [str(file)] else BODY)
    assert code == 0
    assert json.loads(out)["outputs"][0]["data"] == [1, 2, 4]


def test_one_output_can_be_picked(command, echo):
    assert command("invoke", "echo", "--output=OUT", stdin=BODY)[1] == "[1.0, 2.0, 4.0]\n"
    code, _, err = command("invoke", "echo", "--output=NONE", stdin=BODY)
    assert code == 1
    assert "NONE" in err


def test_raw_tensors_stay_as_they_are_in_a_pipe(environ, echo):
    done = run("invoke", "echo", environ=environ, stdin=request_of(**BINARY))
    assert done.returncode == 0
    assert done.stdout.endswith(b"}" + RAW)
    done = run("invoke", "echo", "--output=OUT", environ=environ, stdin=request_of(**BINARY))
    assert done.stdout == RAW


def test_json_has_raw_tensors_as_values(command, echo):
    _, out, _ = command("invoke", "echo", "--json", stdin=request_of(**BINARY))
    assert json.loads(out)["outputs"] == [
        {"name": "OUT", "datatype": "FP32", "shape": [3], "data": [1, 2, 4]}
    ]


def test_a_file_that_is_not_there_is_a_bad_argument(command, echo):
    code, out, err = command("invoke", "echo", "/nowhere.json")
    assert (code, out) == (2, "")
    assert err == "triton-adapter: FILE '/nowhere.json': No such file or directory\n"


def test_the_texts_of_a_refused_request_are_shown(command, echo):
    code, _, err = command("invoke", "echo", stdin=b"{")
    assert code == 1
    assert "triton-adapter: 400 InvalidRequest: " in err


# -- memory, sockets, names ---------------------------------------------------------------------


def test_memory_is_told_for_each_device_with_a_bar(command):
    command("load", "one", str(EXAMPLES / "hungry"))
    code, out, _ = command("memory")
    head, row, bar, *_ = out.splitlines()
    assert code == 0
    assert head.split() == ["DEVICE", "LIMIT", "USED", "HELD", "RESERVED", "FREE"]
    assert row.split()[:3] == ["host", "1.0", "GiB"]
    assert re.fullmatch(r"  \[#{26,30}=*\.+-+\]", bar)
    assert len(bar.strip()) == 42
    assert "measured by: host" in out
    assert json.loads(command("memory", "--json")[1])["devices"]["host"]["limit_bytes"] == LIMIT


def test_listeners_in_the_file_system_are_asked_too(tmp_path, packages):
    sockets = {name: f"unix:{tmp_path}/{name}.sock" for name in ("http", "admin")}
    flags = [f"--{name}={at}" for name, at in sockets.items()]
    with embedded_adapter(*flags, f"--model-roots={packages}", COMPLETE):
        environ = {f"ADAPTER_{name.upper()}": at for name, at in sockets.items()}
        assert run("load", "echo", str(packages / "echo"), environ=environ).returncode == 0
        assert run("invoke", "echo", environ=environ, stdin=BODY).returncode == 0
        assert b"echo  READY" in run("ps", f"--url={sockets['admin']}", environ={}).stdout
        done = run("unload", "echo", f"--url={sockets['http']}", environ={})
        assert (done.returncode, done.stderr) == (0, b"")


def test_a_name_that_is_no_text_for_a_terminal_is_escaped(command, packages):
    name = "two\nlines\x1b[2J"
    assert command("load", name, str(packages / "echo"))[0] == 0
    assert "two\\nlines\\x1b[2J  READY" in command("ps")[1]
    assert command("invoke", name, stdin=BODY)[0] == 0
    code, out, _ = command("unload", name)
    assert (code, out.count("\n")) == (0, 1)


def test_the_settings_file_says_where_the_adapter_is(adapter, tmp_path):
    (file := tmp_path / "adapter.yaml").write_text(f"admin: {adapter.admin}\n")
    assert run("ps", f"--config={file}", environ={}).returncode == 0
    assert run("ps", f"--admin={adapter.admin}", environ={}).returncode == 0

"""No command lets an argument, a setting or a server drive the terminal."""

import json
from datetime import UTC, datetime

import pytest

from adapter.cli.commands import COMMANDS
from tests.cases import rows
from tests.trees import write_python_model

HOSTILE = "a\x1b[2J\x1b]0;owned\x07\r\x9b\u202ez"
URL = f"http://127.0.0.1:1/{HOSTILE}"
SOCKET = f"--url=unix:/{HOSTILE}"
# What an operator may have pasted, by command.
ARGUMENTS = {
    "serve": [(f"--config={HOSTILE}",), (f"--http={HOSTILE}",)],
    "list": [(SOCKET,), (HOSTILE, SOCKET), (f"--limit={HOSTILE}",)],
    "show": [(HOSTILE, SOCKET), (HOSTILE, f"--url={URL}")],
    "ps": [
        (SOCKET,),
        (SOCKET, HOSTILE),
        (f"--url={HOSTILE}",),
        (f"--admin={HOSTILE}",),
        (f"--config={HOSTILE}",),
    ],
    "load": [(HOSTILE, HOSTILE, SOCKET), (HOSTILE, HOSTILE, f"--url={URL}")],
    "unload": [(HOSTILE, SOCKET)],
    "forget": [(HOSTILE, SOCKET), (HOSTILE, f"--url={URL}")],
    "wait": [(SOCKET, "--timeout=0.1"), (f"--timeout={HOSTILE}",)],
    "healthcheck": [(SOCKET,), (f"--url={URL}",)],
    "drain": [(SOCKET, "--timeout=0.1"), (f"--timeout={HOSTILE}",)],
    "inspect": [(HOSTILE,), (f"s3://{HOSTILE}/b",), (f"{HOSTILE}/b", "--name=m")],
    "check-config": [(f"--model-roots=/{HOSTILE}",), (f"--config={HOSTILE}",)],
    "schema": [(HOSTILE,)],
    "completion": [(HOSTILE,)],
    "version": [(HOSTILE,)],
    "help": [(HOSTILE,)],
}
CASES = [(command, *given) for command, several in ARGUMENTS.items() for given in several]
# What a server may answer, or what stands between here and the adapter.
DEVICE = dict.fromkeys(("limit_bytes", "used_bytes", "free_bytes", "not_attributed_bytes"), 1)
MODEL = {
    "model_id": HOSTILE,
    "state": "READY",
    "state_seconds": 1,
    "bytes": {HOSTILE: 1},
    "basis": HOSTILE,
    "in_flight": HOSTILE,
    "served": 1,
    "idle_seconds": None,
    "waits_for": HOSTILE,
    "hanging_seconds": None,
    "awaits": [HOSTILE],
    "is_pinned": False,
    "gpu": None,
    "warnings": [HOSTILE],
}
NOW = datetime.now(UTC).isoformat()
FAILURE = {
    "time": NOW,
    "operation": HOSTILE,
    "model_id": HOSTILE,
    "code": HOSTILE,
    "count": 1,
    "is_mended": False,
}
STATE = {
    "models": [MODEL],
    "on_demand": {
        "models": [],
        "on_disk": {"models": HOSTILE, "bytes": 1},
        "disk": {"models": HOSTILE, "bytes": 1, "limit_bytes": 1},
        "evictions": {HOSTILE: 1},
    },
    "forgotten": [{"time": NOW, "model_id": HOSTILE, "is_given_up": True, "reason": HOSTILE}],
    "failures": [FAILURE | {"reason": HOSTILE}],
    "events": [FAILURE | {"evicted": "room", "reason": HOSTILE}],
    "memory": {"devices": {HOSTILE: DEVICE}, "source": HOSTILE},
}
STORE_MODEL = {
    **MODEL,
    "name": HOSTILE,
    "loaded_as": [HOSTILE],
    "where": "store",
    "state": HOSTILE,
    "reason": HOSTILE,
    "is_given_up": True,
    "is_pinned": True,
    "memory_bytes": 1,
    "last_used": NOW,
    "store": HOSTILE,
    "key": HOSTILE,
    "package_bytes": 1,
    "disk_bytes": 1,
    "etag": HOSTILE,
    "modified": NOW,
    "is_outdated": True,
}
STORE_MODELS = {
    **STORE_MODEL,
    "size": {"bytes": {HOSTILE: 1}, "basis": HOSTILE, "declared_bytes": 1, "measured_bytes": 1},
    "call": {"operation": "endpoint", "endpoint": HOSTILE, "model": HOSTILE},
    "models": [STORE_MODEL],
    "after": HOSTILE,
    "notes": [HOSTILE],
}
ERROR = {"error": HOSTILE, "code": HOSTILE, "reason": HOSTILE, "needed_bytes": 1, "device": HOSTILE}
BODIES = {
    "state": (200, json.dumps(STATE)),
    "store": (200, json.dumps(STORE_MODELS)),
    "error": (400, json.dumps(ERROR)),
    "known": (507, json.dumps(ERROR | {"code": "ModelTooLarge", "device": [HOSTILE]})),
    "odd": (500, json.dumps({"error": {HOSTILE: 1}, "code": [HOSTILE]})),
    "page": (404, f"<html>{HOSTILE}"),
    "nothing": (200, HOSTILE),
}
ASKING = {
    "list": (),
    "show": (HOSTILE,),
    "ps": (),
    "load": ("m", "examples"),
    "unload": (HOSTILE,),
    "forget": (HOSTILE,),
    "wait": ("--timeout=0.1",),
    "healthcheck": (),
    "drain": ("--timeout=1",),
}


def rude(text: str) -> str:
    return "".join(each for each in text if each != "\n" and not each.isprintable())


def test_each_command_is_here():
    assert ARGUMENTS.keys() == COMMANDS.keys()


@rows("argv", CASES)
def test_an_argument_is_escaped(run, argv):
    code, out, err = run(*argv)
    assert (code != 0) == (argv[:2] != ("check-config", f"--model-roots=/{HOSTILE}"))
    assert "\\x1b" in out + err
    assert rude(out + err) == ""


@rows("command", list(COMMANDS))
def test_a_flag_that_there_is_not_is_escaped(run, command):
    code, _, err = run(command, f"--{HOSTILE}")
    assert code == 2
    assert rude(err) == ""


def test_a_command_that_there_is_not_is_escaped(run):
    assert rude(run(HOSTILE)[2]) == ""


@pytest.mark.parametrize("command", list(ASKING))
@rows("body", list(BODIES))
def test_what_a_server_says_is_escaped(run, sidecar, command, body):
    status, said = BODIES[body]
    server = sidecar(status)
    server.body = said.encode()
    address = f"127.0.0.1:{server.server_port}"
    environ = {"ADAPTER_ADMIN": address, "ADAPTER_HTTP": address}
    _, out, err = run(command, *ASKING[command], environ=environ)
    assert server.asked
    assert rude(out + err) == ""


def test_names_within_a_package_are_escaped(run, tmp_path):
    folder = write_python_model(tmp_path / f"m{HOSTILE}")
    assert rude("".join(run("inspect", str(folder))[1:])) == ""
    (folder / "config.pbtxt").write_text(f'name: "{HOSTILE}" {HOSTILE}')
    code, out, err = run("inspect", str(folder))
    assert code == 1
    assert rude(out + err) == ""


def test_a_setting_of_the_environment_is_escaped(run):
    environ = {"ADAPTER_MODEL_ROOTS": f"/{HOSTILE}", "ADAPTER_HTPP": HOSTILE}
    assert rude("".join(run("check-config", environ=environ)[1:])) == ""
    del environ["ADAPTER_HTPP"]
    code, out, err = run("check-config", environ=environ)
    assert (code, rude(out + err)) == (0, "")

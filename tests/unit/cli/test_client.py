"""What the client commands make of answers that no adapter of this version gives."""

import json

import pytest

from adapter.cli.client import Target
from adapter.cli.models import describe_step
from tests.unit.cli.conftest import admin

WAITING = {"waits_for": "memory", "hanging_seconds": None, "awaits": []}


class TestClient:
    def test_adapter_of_another_version_is_told_from_bug(self, run, sidecar):
        server = sidecar(200)
        server.body = b'{"version": "0.0.1"}'
        code, _, err = run("ps", environ=admin(server))
        assert code == 1
        assert f"http://127.0.0.1:{server.server_port} is not an adapter of this version" in err

    @pytest.mark.parametrize(
        ("command", "state", "news"),
        [
            ("load", {"models": [WAITING]}, "waiting for memory"),
            ("load", {"models": [{"waits_for": None}]}, ""),
            ("load", {"models": []}, ""),
            ("unload", {"models": []}, "waiting for its memory to be free"),
            ("unload", {"version": "0.0.1"}, ""),
        ],
    )
    def test_news_of_operation_are_what_admin_listener_tells(self, sidecar, command, state, news):
        server = sidecar(200)
        server.body = json.dumps(state).encode()
        assert describe_step(Target("127.0.0.1", server.server_port), "a/b", command) == news
        assert server.asked == ["/debug/state?model_id=a%2Fb"]

    @pytest.mark.parametrize(
        "model",
        [
            {
                "model_id": "digits",
                "state": "READY",
                "bytes": {"GPU-1": 2**30},
                "basis": "measured",
            },
            {"warnings": [], "bytes": None, "basis": None, "state": "READY"},
            "digits",
        ],
    )
    def test_load_succeeds_when_admin_answers_oddly(self, run, sidecar, model):
        """The model is loaded: an answer of another version about its size is no failure."""
        http = sidecar(200)
        http.body = b"{}"
        server = sidecar(200)
        server.body = json.dumps({"models": [model]}).encode()
        environ = admin(server) | {"ADAPTER_HTTP": f"127.0.0.1:{http.server_port}"}
        code, out, err = run("load", "digits", "file:///models/digits", environ=environ)
        assert (code, err) == (0, "")
        assert out.startswith("digits is loaded after ")
        assert http.asked == ["POST /models"]

    def test_of_what_no_adapter_says_beginning_is_told(self, run, sidecar):
        server = sidecar(502)
        server.body = b"<html>\n" + b"x" * 10_000
        code, _, err = run("ps", environ=admin(server))
        assert code == 1
        assert err.startswith("triton-adapter: 502: <html>\n  xxx")
        assert len(err) < 500

    def test_commands_ask_below_the_path_of_url(self, run, sidecar):
        """Several adapters behind one address differ by it alone."""
        server = sidecar(200)
        server.body = b"{}"
        url = f"--url=http://127.0.0.1:{server.server_port}/adapters/7"
        assert run("unload", "a/b", url)[0] == 0
        run("ps", url)
        assert server.asked == ["DELETE /adapters/7/models/a%2Fb", "/adapters/7/debug/state"]

    @pytest.mark.parametrize("command", [["ps"], ["load", "m", "/models/m"]])
    @pytest.mark.parametrize(
        ("url", "reason"),
        [
            ("http://adapter..local:8081", "label empty or too long"),
            (f"http://{'a' * 64}:8081", "label too long"),
            ("http://two words:8081", "control characters"),
            ("http://127.0.0.1:1/\N{LATIN SMALL LETTER U WITH DIAERESIS}", "can't encode"),
        ],
    )
    def test_url_without_a_host_ends_the_command(self, run, command, url, reason):
        """Python raises errors of its own kinds for names that no host can have."""
        code, _, err = run(*command, f"--url={url}")
        assert code == 1
        assert reason in err
        assert "is an adapter running there?" in err

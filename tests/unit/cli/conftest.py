"""The command in this process, and an admin listener that is pretended."""

import socketserver
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from adapter.cli.main import main


class Answers(BaseHTTPRequestHandler):
    """Gives the server's answers one after another, the last of them for ever."""

    def do_POST(self) -> None:
        self._answer(f"POST {self.path}")

    def do_DELETE(self) -> None:
        self._answer(f"DELETE {self.path}")

    def do_GET(self) -> None:
        self._answer(self.path)

    def _answer(self, asked: str) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(asked)
        left = self.server.statuses
        status = left.pop(0) if len(left) > 1 else left[0]
        body = self.server.body or f"status is {status}".encode()
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
    server.statuses, server.asked, server.body = list(statuses), [], b""
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
        code = main(argv, environ or {})
        out, err = capsys.readouterr()
        return code, out, err

    return run_command


def admin(server) -> dict[str, str]:
    """The settings of a sidecar whose admin listener that is, as it would be given to listen."""
    return {"ADAPTER_ADMIN": f"0.0.0.0:{server.server_port}"}

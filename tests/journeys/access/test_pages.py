"""Pages in a browser at listeners of all addresses, as compose and a port-forward reach them."""

from collections.abc import Iterator

import pytest

from tests.cases import rows
from tests.running import Client, RunningAdapter, embedded_adapter
from tests.trees import infer_body

pytestmark = pytest.mark.triton

TOKEN = "canary-51d24b867f3a9c0e"  # noqa: S105 - it opens nothing else
REBOUND = {"Host": "evil.example:8080", "Origin": "http://evil.example:8080"}
FOREIGN = {"Origin": "https://evil.example"}
OPAQUE = {"Origin": "null"}
ALLOWED = {"Host": "app.example", "Origin": "https://app.example"}
WITH_TOKEN = {
    "Host": "other.example",
    "Origin": "https://other.example",
    "Authorization": f"Bearer {TOKEN}",
}
LOCAL = {"Host": "127.0.0.1:49152", "Origin": "http://127.0.0.1:49152"}
FORWARDED = {"Host": "localhost:49152", "Origin": "http://localhost:49152"}
# What no browser sends.
PLAIN = (
    {"Host": "adapter.models.svc.cluster.local:8080"},
    {"Host": "10.1.2.3:8080"},
    {"Host": "localhost:8080"},
    {"Host": "adapter"},
)


@pytest.fixture(scope="module")
def published(root) -> Iterator[RunningAdapter]:
    listeners = ("http", "http-data", "admin", "metrics")
    flags = [f"--{name}=0.0.0.0:0" for name in listeners]
    flags += [f"--model-roots={root}", "--allowed-hosts=app.example"]
    with embedded_adapter(*flags) as adapter:
        with adapter.client() as client:
            client.load_model("echo", root / "echo")
        yield adapter


@pytest.fixture(scope="module")
def guarded(root, tmp_path_factory) -> Iterator[RunningAdapter]:
    file = tmp_path_factory.mktemp("secret") / "token"
    file.write_text(TOKEN)
    flags = [f"--model-roots={root}", "--http=0.0.0.0:0"]
    given = {"ADAPTER_CONTROL_TOKEN": f"file:{file}"}
    with embedded_adapter(*flags, environ=given) as adapter:
        yield adapter


def ask(
    adapter: RunningAdapter, listener: str, method: str, path: str, headers: dict[str, str]
) -> tuple[int, str]:
    body = infer_body(1.0) if path.endswith(("infer", "invoke")) else None
    with Client(adapter.listeners[listener]) as client:
        reply = client.request(method, path, body, {"Content-Type": "text/plain", **headers})
        return reply.status, reply.body.decode()


CALLS = (
    ("http", "POST", "/v2/repository/models/echo/load"),
    ("http", "POST", "/models/echo/invoke"),
    ("http", "GET", "/models"),
    ("http_data", "POST", "/v2/models/echo/infer"),
    ("admin", "POST", "/drain"),
    ("admin", "GET", "/debug/state"),
    ("metrics", "GET", "/metrics"),
)
PROBES = [
    ("http", "GET", "/ping"),
    ("http", "GET", "/v2/health/ready"),
    ("http_data", "GET", "/v2/health/live"),
    *(("metrics", "GET", f"/{path}") for path in ("startup", "livez", "readyz")),
    ("admin", "GET", "/"),  # the status page
]


@pytest.mark.parametrize("headers", [REBOUND, FOREIGN, OPAQUE])
@rows("call", CALLS)
def test_foreign_page_is_refused_at_all_addresses(published, call, headers):
    """A page whose name points here (DNS rebinding) chooses Host and Origin alike."""
    status, text = ask(published, *call, headers)
    assert status == 403
    assert "allowed_hosts" in text


@pytest.mark.parametrize("headers", [ALLOWED, LOCAL, FORWARDED, *PLAIN])
@rows("call", [call for call in CALLS if call[2] != "/drain"] + PROBES)
def test_own_pages_and_other_clients_are_served(published, call, headers):
    """A web application behind a proxy whose host name is allowed, local pages, and clients."""
    assert ask(published, *call, headers)[0] == 200


def test_page_with_the_token_may_load(guarded, root):
    call = ("http", "POST", "/v2/repository/models/echo/load")
    assert ask(guarded, *call, WITH_TOKEN)[0] == 200
    wrong = WITH_TOKEN | {"Authorization": "Bearer another-token-of-nobody"}
    assert ask(guarded, *call, wrong)[0] == 403

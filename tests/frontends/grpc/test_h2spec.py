"""The listener `grpc` as an HTTP/2 server: h2spec's generic, hpack and http2 groups."""

import asyncio
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.builds import build, built

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CASES = 145

# by h2spec's section and case: what does not pass, and why that is right
LEFT_OUT = {
    ("generic/5", "Sends a dynamic table size update"): (
        "RFC 7541 section 4.2: no size may be over SETTINGS_HEADER_TABLE_SIZE, which is 0 here"
    ),
    ("generic/5", "Sends multiple dynamic table size update"): ("RFC 7541 section 4.2: the same"),
    ("http2/5.1", "closed: Sends a HEADERS frame"): (
        "RFC 9113 section 5.1: it may end the connection, which the other calls of the connection "
        "would pay for; RFC 7540 had a must"
    ),
    ("http2/5.1.1", "Sends stream identifier that is numerically smaller than previous"): (
        "RFC 9113 section 5.1.1: such a stream is closed by then, so this is the same"
    ),
    ("http2/5.3.1", "Sends HEADERS frame that depend on itself"): (
        "RFC 9113 section 5.3.2: nothing is made of priorities, which RFC 7540 had"
    ),
    ("http2/5.3.1", "Sends PRIORITY frame that depend on itself"): (
        "RFC 9113 section 5.3.2: the same"
    ),
}


@pytest.fixture(scope="module")
def h2spec(pytestconfig) -> Path:
    source = Path(__file__).with_name("h2spec")
    folder, is_built = built(pytestconfig, source, "go")
    if not is_built:
        package = "github.com/summerwind/h2spec/cmd/h2spec"
        build(folder, source, "go", "build", "-o", str(folder / "h2spec"), package)
    return folder / "h2spec"


async def test_listener_passes_h2spec(proxy, h2spec, tmp_path):
    report = tmp_path / "report.xml"
    host, port = proxy.address.split(":")
    asked = ("generic", "hpack", "http2", "--host", host, "--port", port)
    # headers so large that five of them are more than a frame may have; seconds to answer
    limits = ("--max-header-length", "16000", "--timeout", "5")
    process = await asyncio.create_subprocess_exec(
        h2spec, *asked, *limits, "--junit-report", report, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    cases = ET.parse(report).findall(".//testcase")  # noqa: S314 - h2spec's own
    failed = {
        (case.get("package"), case.get("classname"))
        for case in cases
        if case.find("error") is not None or case.find("failure") is not None
    }
    skipped = [case.get("classname") for case in cases if case.find("skipped") is not None]
    assert failed == LEFT_OUT.keys(), said.decode()
    assert skipped == []
    assert len(cases) == CASES

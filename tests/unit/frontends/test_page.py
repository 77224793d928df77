"""The page is one file, and its policy names what is in it."""

import base64
import hashlib
import re
from pathlib import Path

from adapter.frontends.admin import pages
from adapter.frontends.admin.pages import content_security_policy

TEXT = Path(pages.__file__).with_name("page.html").read_text(encoding="utf-8")


def test_policy_allows_only_hashed_scripts_and_styles():
    policy = content_security_policy("<style>a{}</style><script>\nb()</script>")
    style, script = (
        base64.b64encode(hashlib.sha256(text).digest()).decode() for text in (b"a{}", b"\nb()")
    )
    rules = policy.split("; ")
    assert rules[0] == "default-src 'none'"
    assert f"style-src 'sha256-{style}'" in rules
    assert f"script-src 'sha256-{script}'" in rules
    assert "unsafe" not in policy


def test_page_has_only_hashed_content():
    html = re.sub(r"<(script|style)>.*?</\1>", "", TEXT, flags=re.DOTALL)
    assert "<script" not in html
    assert "<style" not in html
    assert re.findall(r"\s(?:on\w+|style|src)=", html) == []
    assert re.findall(r'href="(.*?)"', html) == ["data:,", "debug/state"]


def test_the_page_writes_text_alone():
    written = re.findall(r"innerHTML|outerHTML|insertAdjacent\w+|document\.write|eval\(", TEXT)
    assert written == []

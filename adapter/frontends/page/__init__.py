"""Serves the page at `/` of the admin listener: one file, which asks /debug/state each second."""

import base64
import hashlib
import re
from pathlib import Path

from aiohttp import web

_FILE = Path(__file__).with_name("index.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class Page:
    """Has the page in memory. Nothing runs in it, and nothing styles it, but what the file has:
    its policy names both by their hashes, and lets it ask nobody but this listener.
    """

    def __init__(self) -> None:
        self._text = _FILE.read_text(encoding="utf-8")
        self._headers = {
            "Content-Security-Policy": content_security_policy(self._text),
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/", self._show)

    async def _show(self, _: web.Request) -> web.Response:
        return web.Response(text=self._text, content_type="text/html", headers=self._headers)


def content_security_policy(text: str) -> str:
    """Allow the scripts and styles of `text` and no others."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    rules = [
        "default-src 'none'",
        *(f"{kind}-src {' '.join(found)}" for kind, found in hashes.items()),
        "connect-src 'self'",
        "img-src data:",  # the empty icon, so that a browser asks for none
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return "; ".join(rules)

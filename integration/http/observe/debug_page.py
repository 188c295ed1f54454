"""GET /: one static page to inspect an engine and to control it by hand. It calls the same endpoints as any client."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

_FILE = Path(__file__).with_name("debug_page.html")
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

router = APIRouter()


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def debug_page() -> HTMLResponse:
    """Show the debug page; all of it comes from one file."""
    text = page()
    return HTMLResponse(text, headers={**_HEADERS, "Content-Security-Policy": security_policy(text)})


@cache
def page() -> str:
    """Read the page's text."""
    return _FILE.read_text(encoding="utf-8")


@cache
def security_policy(text: str) -> str:
    """Make a policy: a browser may run only the page's own script and styles, by their hashes, and load nothing."""
    allowed = {
        tag: " ".join(_source(body) for body in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL))
        for tag in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _source(body: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"

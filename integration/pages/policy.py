"""The content policy of a page: a browser may run only the page's own script and styles, by their hashes."""

from __future__ import annotations

import base64
import hashlib
import re

HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def own_sources(text: str) -> str:
    """Return the directives that allow the page's own script and styles, and nothing else."""
    allowed = {
        tag: " ".join(_source(body) for body in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL))
        for tag in ("script", "style")
    }
    return f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}"


def served_policy(text: str) -> str:
    """Return the policy of a page that calls the server it comes from."""
    return f"{own_sources(text)}; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _source(body: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"

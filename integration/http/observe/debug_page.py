"""GET /: one static page to inspect an engine and to control it by hand. It calls the same endpoints as any client."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from ...pages.policy import HEADERS, served_policy

_FILE = Path(__file__).with_name("debug_page.html")

router = APIRouter()


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def debug_page() -> HTMLResponse:
    """Show the debug page; all of it comes from one file."""
    text = page()
    return HTMLResponse(text, headers={**HEADERS, "Content-Security-Policy": served_policy(text)})


@cache
def page() -> str:
    """Read the page's text."""
    return _FILE.read_text(encoding="utf-8")

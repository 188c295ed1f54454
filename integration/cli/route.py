"""`lockstep route`: serve many engines at one address."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from .arguments.parser import PACKAGE, CommandParser
from .arguments.settings import build, named, read_settings


def run(arguments: Sequence[str]) -> int:
    """Route until SIGTERM or SIGINT. Returns the exit code."""
    options = _parse(arguments)
    from ..http.edge.config import HttpConfig
    from ..router import server
    from ..router.config import RouterConfig

    given = {"host": options.host, "port": options.port, "api_key": options.api_key}
    given |= {"admin_api_key": options.admin_api_key}
    http = build(HttpConfig, {name: value for name, value in given.items() if value is not None})
    settings = read_settings("--setting", options.setting)
    if twice := sorted(settings.keys() & {"http", "workers", "journal", "forget_served"}):
        raise ValueError(f"--setting: {', '.join(twice)} has a flag of its own")
    settings |= {"workers": tuple(options.worker), "http": http, "journal": options.journal}
    settings["forget_served"] = options.forget_served
    config = named("route", lambda: build(RouterConfig, settings))
    logging.getLogger(PACKAGE).setLevel(logging.INFO)  # the router logs workers that appear and fail

    def announce(url: str) -> None:
        print(f"lockstep: routing at {url}", file=sys.stderr, flush=True)

    try:
        server.route(config, announce)
    except OSError as error:
        raise ValueError(str(error)) from error
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="lockstep route",
        description="Serve many engines at one address: generation goes to the least loaded engine that has the "
        "prompt's KV, administration to all engines. SIGTERM and Ctrl-C let open requests finish and end it with 0; a "
        "second one ends it at once.",
    )
    parser.add_argument(
        "--worker", action="extend", nargs="+", default=[], metavar="URL",
        help="addresses of engines; more may be added later",
    )  # fmt: skip
    parser.add_argument("--host", help="address to listen on, default 127.0.0.1; others need an admin key")
    parser.add_argument("--port", type=int, default=30080, help="port to listen on, default 30080; 0: a free one")
    parser.add_argument("--api-key", metavar="KEY", help="key that requests must carry; default: LOCKSTEP_API_KEY")
    parser.add_argument(
        "--admin-api-key", metavar="KEY",
        help="key that administration must carry; default: LOCKSTEP_ADMIN_KEY, or SGLANG_OMNI_ADMIN_KEY",
    )  # fmt: skip
    parser.add_argument(
        "--journal", type=Path, metavar="FILE",
        help="file about the update in progress; default: in ~/.local/state/lockstep, by port. Beside it, for a "
        "restart, FILE.workers.json keeps the workers that were added, removed or disabled at run time (delete it to "
        "begin with the --worker list alone), FILE.served.json the weights that the fleet served last, which "
        "workers that were restarted must have; neither with --port 0 and no FILE",
    )  # fmt: skip
    parser.add_argument(
        "--forget-served", action="store_true",
        help="remove FILE.served.json at the start, so that the workers serve with any weights: for a new job whose "
        "workers have the addresses of the one before. (Of a fleet without any of those workers it is removed anyway.)",
    )  # fmt: skip
    parser.add_argument(
        "--setting", action="extend", nargs="+", default=[], metavar="KEY=VALUE",
        help="other settings: health_interval_s=2 queue_timeout_s=60 affinity_slack=8 allow_mixed_versions=true ...",
    )  # fmt: skip
    return parser.parse_args(arguments)

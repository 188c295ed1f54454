"""Write the pages of docs/reference that follow from the code: settings, command line, metrics, HTTP paths.

    python docs/make_reference.py          # write the pages
    python docs/make_reference.py --check  # exit with 1 where a page does not follow from the code

The text of a setting is the comment beside its field, that of an option its help, that of a metric its help line, and
that of an HTTP path the first sentence of its handler's docstring.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import io
import itertools
import os
import re
import sys
import tempfile
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, get_type_hints

FOLDER = Path(__file__).resolve().parent / "reference"
HEAD = "<!-- Written by docs/make_reference.py. Edit the code, then run that script. -->\n"


# -- settings ----------------------------------------------------------------------------------------------------------


def field_comments(cls: type) -> dict[str, str]:
    """Read the comment of each field of a dataclass: that beside it, with the lines below it that hold only a comment.
    Where none is beside a field, the lines above are its own."""
    fields = [field.name for field in dataclasses.fields(cls)]
    beside, below = dict.fromkeys(fields, ""), dict.fromkeys(fields, "")
    name, depth, line_start = None, 0, True
    for token in tokenize.generate_tokens(io.StringIO(textwrap.dedent(inspect.getsource(cls))).readline):
        if token.type == tokenize.INDENT:
            depth += 1
        elif token.type == tokenize.DEDENT:
            depth -= 1
        elif token.type == tokenize.COMMENT and name is not None:
            found = below if line_start else beside
            found[name] = f"{found[name]} {token.string.lstrip('# ')}".strip()
        elif token.type in (tokenize.NEWLINE, tokenize.NL):
            line_start = True
            continue
        elif line_start and depth == 1:
            name = token.string if token.type == tokenize.NAME and token.string in beside else None
        line_start = False
    types = get_type_hints(cls)
    for before, after in itertools.pairwise(fields):
        if not beside[after] and not dataclasses.is_dataclass(types[after]):  # a section has its comments within it
            beside[after], below[before] = below[before], ""
    return {name: f"{beside[name]} {below[name]}".strip() for name in fields}


def default_of(field: dataclasses.Field[Any]) -> str:
    """Format the default of a field as in a config file or in Python."""
    if field.default is not dataclasses.MISSING:
        value: object = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
        if dataclasses.is_dataclass(value):
            return f"`{type(value).__name__}(port={value.port})`"  # type: ignore[attr-defined]
    else:
        return "required"
    return f"`{value!r}`" if not isinstance(value, os.PathLike) else f"`{value}`"


def settings_table(cls: type) -> str:
    """Write a table with a row for each field of a dataclass of settings."""
    meanings = field_comments(cls)
    rows = [f"| `{f.name}` | {default_of(f)} | {cell(meanings[f.name])} |" for f in dataclasses.fields(cls)]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def job_settings(cls: type, prefix: str = "") -> Iterator[tuple[str, object, str]]:
    """List (key, default, comment) of every setting of the job. A missing default is dataclasses.MISSING."""
    from lockstep.integration.grpo.settings.reading import section_of_each

    comments, types = field_comments(cls), get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(types[field.name]):
            yield from job_settings(types[field.name], f"{prefix}{field.name}.")
        elif section := section_of_each(types[field.name]):
            yield from job_settings(section, f"{prefix}{field.name}.NAME.")
        else:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            yield f"{prefix}{field.name}", default, comments[field.name]


def job_table() -> str:
    """Write a table with a row for each setting of the job, with defaults as in TOML."""
    from lockstep.integration.grpo.settings.config import JobConfig

    rows = []
    for key, default, comment in job_settings(JobConfig):
        text = str(default).lower() if isinstance(default, bool) else "" if default in ({}, None) else str(default)
        shown = "required" if default is dataclasses.MISSING else f"`{text}`" if text else "empty"
        rows.append(f"| `{key}` | {shown} | {cell(comment)} |")
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def settings_page() -> str:
    from lockstep.integration.http.edge.config import HttpConfig
    from lockstep.integration.router.config import RouterConfig
    from lockstep.integration.service_config import ServiceConfig
    from lockstep.rollout.config import EngineConfig
    from lockstep.rollout.request_options import RequestOptions
    from lockstep.rollout.sampling_params import SamplingParams

    parts = [
        "# Settings",
        "## The training job",
        "Keys of a TOML file such as `configs/arithmetic_cpu.toml`. `section.key=value` on the command line replaces a "
        "key of the file. [The guide](../guides/training-job.md) explains the job.",
        job_table(),
    ]
    for title, cls, text in (
        ("EngineConfig", EngineConfig, "One engine: `Engine(model, EngineConfig(max_num_seqs=64))`. Also the "
         "`--engine` settings of `lockstep generate` and `lockstep serve`, and the table `engine` of a server's TOML "
         "file. The job sets the few that its own `engine.` keys name."),
        ("SamplingParams", SamplingParams, "One request. The names, defaults and ranges are SGLang's. Also the "
         "`--sampling` settings of `lockstep generate` and `sampling_params` over HTTP. `beam_width` is refused."),
        ("RequestOptions", RequestOptions, "Further options of one request, for `options=` of `engine.generate` and "
         "its relatives."),
        ("ServiceConfig", ServiceConfig, "One `RolloutService`. Also the table `service` of a server's TOML file."),
        ("HttpConfig", HttpConfig, "One HTTP server. Also the table `http` of a server's TOML file."),
        ("RouterConfig", RouterConfig, "One router. `lockstep route --setting key=value` sets those without a flag."),
    ):  # fmt: skip
        parts += [f"## {title}", f"{text} (`{cls.__module__}`)", settings_table(cls)]
    return page(parts)


# -- the command line --------------------------------------------------------------------------------------------------


def parser_of(*words: str) -> argparse.ArgumentParser:
    """Return the parser of `lockstep WORDS`, by asking for its --help."""
    from lockstep.integration.cli.arguments.parser import CommandParser
    from lockstep.integration.cli.main import main

    found: list[argparse.ArgumentParser] = []
    shown = CommandParser.print_help
    CommandParser.print_help = lambda self, file=None: found.append(self)  # type: ignore[method-assign]
    try:
        main([*words, "--help"])
    except SystemExit as end:
        if end.code:
            raise ValueError(f"lockstep {' '.join(words)} --help exits with {end.code}") from None
    finally:
        CommandParser.print_help = shown  # type: ignore[method-assign]
    return found[0]


def commands() -> dict[str, str]:
    """List every command of `lockstep` with its line of `lockstep --help`."""
    return dict(re.findall(r"^  (\w+) +(.+)$", parser_of().epilog or "", re.MULTILINE))


def options_table(parser: argparse.ArgumentParser) -> str:
    """Write a table with a row for each option and argument of a parser; "" where it has only --help."""
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction | argparse._VersionAction):
            continue
        names = ", ".join(f"`{name}`" for name in action.option_strings)
        if not names:
            names = f"`{action.metavar or action.dest}`"
        elif action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction):
            value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "VALUE")
            names += f" `{value}`"
        text = (action.help or "").removesuffix(" (default: %(default)s)")  # which only some versions of Python add
        text = cell(text % {"default": action.default, "prog": parser.prog})
        default = action.default
        if "default" not in text and default not in (None, False, [], "", argparse.SUPPRESS) and action.option_strings:
            shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
            text = f"{text}; default {shown}" if text else f"default {shown}"
        rows.append(f"| {names} | {text}{'; required' if action.required and action.option_strings else ''} |")
    return "\n".join(["| option | meaning |", "|---|---|", *rows]) if rows else ""


def cli_page() -> str:
    from lockstep.integration.cli.bench import BENCHMARKS

    rows = [f"| `lockstep {name}` | {cell(what)} |" for name, what in commands().items()]
    parts = [
        "# Command line",
        "`lockstep COMMAND`. A mistake is answered in one line, with exit code 2; too little memory, a file that "
        "cannot be written and weights that give no numbers with 1, or with 71 where 1 is a verdict (`replay`, "
        "`explain`, `doctor`, `bench`); standard output that cannot be written with 74. `lockstep --version` prints "
        "the version, `lockstep COMMAND --help` the help of a command.",
        "\n".join(["| command | what it does |", "|---|---|", *rows]),
    ]
    for name in commands():
        if name == "bench":
            continue
        parser = parser_of(name)
        parts += [f"## lockstep {name}", sentence(parser.description), options_table(parser)]
        if name == "ctl":
            parts += [sentence(parser.epilog), *verb_parts(parser)]
    parts += [
        "## lockstep bench",
        "`lockstep bench NAME`. Every benchmark takes `--json`: print one JSON object, on the last line. The exit code "
        "is 1 where a benchmark missed one of its bars.",
    ]
    for name, what in BENCHMARKS.items():
        parts += [f"### lockstep bench {name}", sentence(what), options_table(parser_of("bench", name))]
    return page(parts)


def verb_parts(parser: argparse.ArgumentParser) -> list[str]:
    """Write the parts of the verbs of `lockstep ctl`, each with its options."""
    verbs = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    parts = []
    for name, verb in verbs.choices.items():
        parts += [f"### lockstep ctl {name}", sentence(verb.description), options_table(verb)]
    return parts


# -- metrics -----------------------------------------------------------------------------------------------------------


def metric_families() -> dict[str, list[tuple[str, str, str, str]]]:
    """List (name, type, labels, help) of every metric, of an engine's server and of a router."""
    from lockstep.integration.http.conversations.collector import SessionsCollector
    from lockstep.integration.http.conversations.store import Sessions
    from lockstep.integration.http.edge.config import HttpConfig
    from lockstep.integration.http.observe.metrics import ServiceCollector
    from lockstep.integration.http.observe.traffic import Traffic, TrafficCollector
    from lockstep.integration.router.changes.journal import UpdateJournal
    from lockstep.integration.router.counters import RouterCounters
    from lockstep.integration.router.fleet.held import HeldRequests
    from lockstep.integration.router.fleet.workers import WorkerRegistry
    from lockstep.integration.router.metrics import RouterCollector
    from lockstep.integration.service import RolloutService

    with tempfile.TemporaryDirectory() as folder, closing(UpdateJournal(Path(folder) / "journal.json")) as journal:
        registry = WorkerRegistry()
        router = RouterCollector(registry, RouterCounters(), journal, HeldRequests(registry, 1))
        service = RolloutService(smallest_engine())
        try:
            found = {
                "An engine's server": [
                    *ServiceCollector(service, "model").collect(), *TrafficCollector(Traffic(), "model").collect(),
                    *SessionsCollector(Sessions(HttpConfig()), "model").collect(),
                ],
                "A router": [*router.collect()],
            }  # fmt: skip
        finally:
            service.close()
    return {
        title: [
            (f"{f.name}_total" if f.type == "counter" else f.name, f.type, ", ".join(f._labelnames), f.documentation)
            for f in families
        ]
        for title, families in found.items()
    }


def smallest_engine() -> Any:
    """Build an engine on a model with a few thousand parameters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from lockstep import Engine, EngineConfig

    torch.set_num_threads(1)
    shape = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return Engine(AutoModelForCausalLM.from_config(Qwen2Config(**shape)).eval(), EngineConfig(kv_cache="4 blocks"))


def metrics_page() -> str:
    parts = [
        "# Metrics",
        "`GET /metrics` answers in Prometheus' text format, or in OpenMetrics where the scraper asks for it. Names "
        "that start with `sglang:` mean what SGLang's metrics of that name mean; the others are Lockstep's own. A "
        "histogram has the usual `_bucket`, `_sum` and `_count`. The same counters, without Prometheus, are in "
        "`engine.metrics` and `service.state()`.",
    ]
    for title, families in metric_families().items():
        rows = [f"| `{name}` | {kind} | {labels} | {cell(what)} |" for name, kind, labels, what in families]
        parts += [f"## {title}", "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows])]
    return page(parts)


# -- HTTP paths --------------------------------------------------------------------------------------------------------


def http_paths() -> dict[str, list[tuple[str, str, str, str]]]:
    """List (path, methods, key, purpose) of every route: served, those also under a session, a router's own,
    refused."""
    from lockstep.integration.http import app as server
    from lockstep.integration.http.admin import unsupported
    from lockstep.integration.http.edge.auth import level_of
    from lockstep.integration.http.edge.session_paths import PATHS
    from lockstep.integration.router import app as router
    from lockstep.integration.router.changes.journal import UpdateJournal
    from lockstep.integration.router.changes.rules import RULES, verb_of
    from lockstep.integration.router.config import RouterConfig
    from lockstep.integration.router.fleet.roster import Roster
    from lockstep.integration.router.fleet.served import ServedFile

    ours = [route for module in server.ROUTERS if module is not unsupported for route in module.router.routes]
    with tempfile.TemporaryDirectory() as folder, closing(UpdateJournal(Path(folder) / "journal.json")) as journal:
        routed = router.create_app(RouterConfig(), journal, Roster(None, ()), ServedFile(None)).routes
    own = [r for r in routed if hasattr(r, "endpoint") and verb_of(r.path) not in RULES]
    refused = {route.path: None for route in unsupported.router.routes}  # type: ignore[attr-defined]
    others = {"/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json", *refused}
    own = [r for r in own if r.path not in others]

    def key_of(path: str) -> str:
        if path in router._OPEN_PATHS:
            return "open"
        return "normal" if path in router._NORMAL_PATHS else level_of(path).value

    def rows(routes: Sequence[Any]) -> list[tuple[str, str, str, str]]:
        merged: dict[str, dict[str, str]] = {}  # path: {method: its text}
        for route in routes:
            text = first_sentence(route.description)
            merged.setdefault(route.path, {}).update(dict.fromkeys(set(route.methods) - {"HEAD"}, text))
        return [(path, " ".join(sorted(texts)), key_of(path), _purpose(texts)) for path, texts in merged.items()]

    served = rows(ours)
    of_sessions = [(f"/sessions/{{id}}{path}", *others) for path, *others in served if path in PATHS]
    return {
        "served": served,
        "sessions": of_sessions,
        "router": rows(own),
        "refused": [(path, "", "", "") for path in refused],
    }


def _purpose(texts: dict[str, str]) -> str:
    """Return the text of a path's methods, with the methods before it where their texts differ."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return " ".join(f"{method}: {texts[method]}" for method in sorted(texts))


def http_page() -> str:
    from lockstep.integration.push.local_target import VERBS
    from lockstep.integration.router.changes.rules import ELSEWHERE, RULES, SAME

    paths = http_paths()
    parts = [
        "# HTTP paths",
        "`GET /openapi.json` has every field. The column *key* says which key a call needs where the server has keys: "
        "`open` none, `normal` one of the two, `admin` the admin key (or the only key). [The guide](../guides/http.md) "
        "explains the use.",
        "## An engine's server",
    ]

    def table(rows: Sequence[tuple[str, str, str, str]]) -> str:
        lines = [f"| `{path}` | {methods} | {key} | {cell(what)} |" for path, methods, key, what in rows]
        return "\n".join(["| path | methods | key | what it does |", "|---|---|---|---|", *lines])

    parts += [table(paths["served"])]
    parts += ["`/lockstep/{verb}` takes these verbs: " + ", ".join(f"`{verb}`" for verb in VERBS) + "."]
    parts += ["A session has these calls under its path ([guide](../guides/conversations.md#by-path)): "
              + ", ".join(f"`{path}`" for path, *_ in paths["sessions"]) + "."]  # fmt: skip
    parts += ["## A router", "A router answers these itself.", table(paths["router"])]
    parts += ["It passes these to all workers, as `/VERB`, `/lockstep/VERB` and `/hicache/VERB`: "
              + ", ".join(f"`{verb}`" for verb in RULES) + ". Likewise "
              + ", ".join(f"`{path}`" for path in (*ELSEWHERE, *(f"/{name}" for name in SAME))) + "."]  # fmt: skip
    parts += ["## Refused", "SGLang, vLLM or AReaL has these paths, Lockstep has not. They answer 501 and say why. "
              "A router answers so where it does not pass a path on to a worker: "
              + ", ".join(f"`{path}`" for path, *_ in paths["refused"]) + "."]  # fmt: skip
    return page(parts)


# -- text --------------------------------------------------------------------------------------------------------------


def cell(text: str) -> str:
    """Escape text for a cell of a table."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def sentence(text: str | None) -> str:
    """Format text as one paragraph, with a capital letter and a full stop."""
    words = " ".join((text or "").split())
    return words and words[0].upper() + words[1:] + ("" if words.endswith((".", "!")) else ".")


def first_sentence(text: str | None) -> str:
    """Return the first sentence of a docstring."""
    return re.split(r"(?<=\.)\s", " ".join((text or "").split()), maxsplit=1)[0]


def page(parts: Sequence[str]) -> str:
    return HEAD + "\n" + "\n\n".join(part for part in parts if part) + "\n"


PAGES = {"settings.md": settings_page, "cli.md": cli_page, "metrics.md": metrics_page, "http-paths.md": http_page}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or with --check compare them. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is out of date")
    options = parser.parse_args(arguments)
    stale = []
    for name, make in PAGES.items():
        path, text = FOLDER / name, make()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not options.check:
            path.write_text(text, encoding="utf-8")
    print(f"{'out of date' if options.check else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

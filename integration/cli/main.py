"""The command `lockstep`: one subcommand a job. Parsing imports nothing heavy; a subcommand imports what it
runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import logging
import os
import platform
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ..version import version
from .bench import BENCHMARKS, bench
from .parser import CommandParser

T = TypeVar("T")
PACKAGE = __package__.split(".")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 2, after one line on stderr, for what the user got wrong."""
    commands = "\n".join(f"  {name:10} {what}" for name, (_, what) in COMMANDS.items())
    parser = CommandParser(
        prog="lockstep",
        description="A rollout engine inside the trainer's torchrun ranks.",
        epilog=f"commands:\n{commands}\n\n`lockstep COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lockstep {version()}")
    parser.add_argument("command", choices=tuple(COMMANDS), metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="see below")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return COMMANDS[options.command][0](options.arguments)
    except ValueError as error:
        print(f"lockstep: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("lockstep: interrupted", file=sys.stderr, flush=True)
        return 130


# -- generate --------------------------------------------------------------------------------------------


def _generate(arguments: Sequence[str]) -> int:
    from ...rollout.config import EngineConfig
    from ...rollout.sampling_params import SamplingParams
    from . import offline

    parser = CommandParser(
        prog="lockstep generate",
        description="Answer every prompt of a file. Answers are appended as they finish; `index` is the number of the "
        "input line, from 0. Run the same command again after an interruption: it goes on where it stopped.",
    )
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a causal LM in Hugging Face format")
    parser.add_argument("--input", default=offline.STANDARD, metavar="FILE", help="JSONL; default -, standard input")
    parser.add_argument("--output", default=offline.STANDARD, metavar="FILE", help="JSONL; default -, standard output")
    parser.add_argument("--text", action="store_true", help="every input line is a prompt, not a JSON object")
    parser.add_argument(
        "--prompt-field",
        default="prompt",
        metavar="NAME",
        help="of the JSON objects: a text or a list of token ids",
    )
    parser.add_argument(
        "--sampling",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="sampling settings, or one JSON object of them: max_new_tokens=64 temperature=0.7 n=4 ...",
    )
    parser.add_argument(
        "--engine",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="engine settings, likewise: kv_cache=2GiB dtype=bfloat16 max_num_seqs=64 ...",
    )
    options = parser.parse_args(arguments)
    job = offline.OfflineJob(
        options.model,
        options.input,
        options.output,
        options.prompt_field,
        options.text,
        SamplingParams.from_dict(read_settings("--sampling", options.sampling)),
        _named("--engine", lambda: EngineConfig.from_dict(read_settings("--engine", options.engine))),
    )
    logging.getLogger(PACKAGE).setLevel(logging.INFO)  # what the engine chose, and why
    tally = offline.generate(job)
    there = f", {tally.num_before} were there" if tally.num_before else ""
    ignored = f"; {tally.num_ignored} could not be taken, see their finish_reason" if tally.num_ignored else ""
    print(f"{tally.num_written} answers written{there}{ignored}", file=sys.stderr)
    return 0


def read_settings(flag: str, items: Sequence[str]) -> dict[str, object]:
    """Settings from `key=value` items and JSON objects, later ones winning.

    A value is read as JSON, and as plain text where it is none. Raises ValueError naming the flag and the item.
    """
    settings: dict[str, object] = {}
    for item in items:
        if item.lstrip().startswith("{"):
            try:
                settings.update(json.loads(item))
            except json.JSONDecodeError as error:
                raise ValueError(f"{flag} {item!r} is not JSON: {error.msg} at column {error.colno}") from error
            continue
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{flag} {item!r} is neither key=value nor a JSON object")
        try:
            settings[key.strip()] = json.loads(text)
        except json.JSONDecodeError:
            settings[key.strip()] = text
    return settings


def _named(flag: str, make: Callable):
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error


# -- serve -----------------------------------------------------------------------------------------------


def _serve(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        prog="lockstep serve",
        description="Serve a model over HTTP: generation, OpenAI's API, and the control and weight verbs that RL "
        "frameworks use. SIGTERM and Ctrl-C end it. A model that is divided among ranks (--engine tp=2 pp=2) is served "
        f"by torchrun --nproc-per-node 4 -m {PACKAGE}.integration.cli serve ...",
    )
    parser.add_argument("--model", metavar="FOLDER", help="a causal LM in Hugging Face format")
    parser.add_argument(
        "--config", metavar="FILE", help="TOML with the tables engine, http and service; flags win over it"
    )
    parser.add_argument("--host", help="default 127.0.0.1; another needs an admin key")
    parser.add_argument("--port", type=int, help="default 30000; 0: a free one")
    parser.add_argument("--api-key", metavar="KEY", help="default: the environment's LOCKSTEP_API_KEY")
    parser.add_argument("--admin-api-key", metavar="KEY", help="default: LOCKSTEP_ADMIN_KEY, or SGLANG_OMNI_ADMIN_KEY")
    parser.add_argument("--served-model-name", metavar="NAME", help="as /v1/models calls it; default: the folder")
    parser.add_argument("--no-pickle", action="store_true", help="refuse the pickled payloads of existing frameworks")
    for flag, what in (
        ("--engine", "engine settings: kv_cache=2GiB dtype=bfloat16 max_num_seqs=64 ..."),
        ("--sglang-arg", "settings that /server_info is to show beside its own: mem_fraction_static=0.8 ..."),
    ):
        parser.add_argument(flag, action="extend", nargs="+", default=[], metavar="KEY=VALUE", help=what)
    options = parser.parse_args(arguments)
    tables = _read_tables(options.config)
    model = options.model or tables["http"].pop("model_path", None)
    if model is None:
        raise ValueError("--model is needed, or http.model_path in the config")
    given = {"host": options.host, "port": options.port, "api_key": options.api_key}
    given |= {"admin_api_key": options.admin_api_key, "model_name": options.served_model_name}
    http = tables["http"] | {name: value for name, value in given.items() if value is not None}
    extra = read_settings("--sglang-arg", options.sglang_arg)
    http |= {"model_path": str(model), "extra_server_args": http.get("extra_server_args", {}) | extra}
    return _serve_model(
        model, http, tables["engine"] | read_settings("--engine", options.engine),
        tables["service"] | ({"allow_pickle": False} if options.no_pickle else {}),
    )  # fmt: skip


def _serve_model(model: str, http: dict[str, object], engine: dict[str, object], service: dict[str, object]) -> int:
    from ...rollout.config import EngineConfig
    from ..http.edge.config import HttpConfig
    from ..service_config import ServiceConfig

    http_config = _named("http", lambda: _built(HttpConfig, http))
    http_config.check_bind()  # before the model is loaded
    engine_config = _named("engine", lambda: EngineConfig.from_dict(engine))
    service_config = _named("service", lambda: _built(ServiceConfig, service))
    if not Path(model, "config.json").is_file():
        raise ValueError(f"--model: {model} is not a model folder (it has no config.json)")
    _named("engine", lambda: _check_ranks(engine_config.tp, engine_config.pp))
    from .serve import serve_model  # only now the heavy imports

    logging.getLogger(PACKAGE).setLevel(logging.INFO)  # what the engine chose, and why
    try:
        serve_model(model, http_config, engine_config, service_config)
    except OSError as error:
        raise ValueError(str(error)) from error
    return 0


def _check_ranks(tp: int, pp: int) -> None:
    """Raises ValueError, naming the command, where this is not one of as many processes as the model is divided
    among."""
    num_ranks, num_started = tp * pp, int(os.environ.get("WORLD_SIZE", "1"))
    command = f"torchrun --nproc-per-node {num_ranks} -m {PACKAGE}.integration.cli serve ... --engine tp={tp} pp={pp}"
    if num_started == 1 < num_ranks:
        raise ValueError(f"tp={tp} pp={pp} divides the model among {num_ranks} processes: start `{command}`")
    if num_started != num_ranks:
        raise ValueError(
            f"tp={tp} pp={pp} makes a replica of {num_ranks}, but torchrun started {num_started} ranks, and one is "
            f"served by itself: start each as `{command}`, with a port of its own, and put `lockstep route` before them"
        )


def _read_tables(path: str | None) -> dict[str, dict[str, object]]:
    """The tables of a config file of `lockstep serve`. Raises ValueError naming what is wrong."""
    tables: dict[str, dict[str, object]] = {"engine": {}, "http": {}, "service": {}}
    if path is None:
        return tables
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {path}: {error}") from error
    if wrong := sorted(name for name, table in found.items() if name not in tables or not isinstance(table, dict)):
        raise ValueError(f"--config {path}: unknown table {', '.join(wrong)}; known: {', '.join(tables)}")
    return tables | found


def _built(kind: type[T], settings: dict[str, object]) -> T:
    """A dataclass of settings. Raises ValueError listing every unknown one."""
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(settings.keys() - known):
        raise ValueError(f"unknown setting: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return kind(**settings)


# -- route -----------------------------------------------------------------------------------------------


def _route(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        prog="lockstep route",
        description="One address for many engines: generation goes to the least loaded one that knows the prompt, "
        "administration to all of them. SIGTERM and Ctrl-C end it.",
    )
    parser.add_argument(
        "--worker", action="extend", nargs="+", default=[], metavar="URL", help="engines; more may be added later"
    )
    parser.add_argument("--host", help="default 127.0.0.1; another needs an admin key")
    parser.add_argument("--port", type=int, default=30080, help="default 30080; 0: a free one")
    parser.add_argument("--api-key", metavar="KEY", help="default: the environment's LOCKSTEP_API_KEY")
    parser.add_argument("--admin-api-key", metavar="KEY", help="default: LOCKSTEP_ADMIN_KEY, or SGLANG_OMNI_ADMIN_KEY")
    parser.add_argument(
        "--journal", type=Path, metavar="FILE",
        help="of the update in progress; default: in ~/.local/state/lockstep, by port. Beside it FILE.workers.json "
        "remembers across restarts which workers were added, removed or disabled at run time (not with --port 0 and no "
        "FILE); delete it to begin with the --worker list alone",
    )  # fmt: skip
    parser.add_argument(
        "--setting", action="extend", nargs="+", default=[], metavar="KEY=VALUE",
        help="others: health_interval_s=2 queue_timeout_s=60 affinity_slack=8 allow_mixed_versions=true ...",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    from ..http.edge.config import HttpConfig
    from ..router import server
    from ..router.config import RouterConfig

    given = {"host": options.host, "port": options.port, "api_key": options.api_key}
    given |= {"admin_api_key": options.admin_api_key}
    http = _built(HttpConfig, {name: value for name, value in given.items() if value is not None})
    settings = read_settings("--setting", options.setting)
    if twice := sorted(settings.keys() & {"http", "workers", "journal"}):
        raise ValueError(f"--setting: {', '.join(twice)} has a flag of its own")
    settings |= {"workers": tuple(options.worker), "http": http, "journal": options.journal}
    config = _named("route", lambda: _built(RouterConfig, settings))
    logging.getLogger(PACKAGE).setLevel(logging.INFO)  # who comes and goes

    def announce(url: str) -> None:
        print(f"lockstep: routing at {url}", file=sys.stderr, flush=True)

    try:
        server.route(config, announce)
    except OSError as error:
        raise ValueError(str(error)) from error
    return 0


# -- ctl -------------------------------------------------------------------------------------------------


def _ctl(arguments: Sequence[str]) -> int:
    from . import ctl

    parser = CommandParser(
        prog="lockstep ctl",
        description="The verbs of a served engine, or of all engines of a router, from a shell.",
        epilog=ctl.exit_codes(),
    )
    ctl.add_arguments(parser)
    return ctl.run(parser.parse_args(arguments))


# -- train -----------------------------------------------------------------------------------------------


def _train(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        prog="lockstep train",
        description="Check a config, then run the GRPO job under torchrun on this machine. For more machines call "
        "torchrun -m lockstep.integration.grpo yourself.",
    )
    parser.add_argument("config", help="a TOML file; see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the file's")
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="ranks; default: run.num_ranks, else one per GPU, else 2",
    )
    parser.add_argument("--check", action="store_true", help="print the plan and stop")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of this run")
    options = parser.parse_intermixed_args(arguments)
    from ..grpo.config import load_config

    config = load_config(options.config, options.overrides)
    # Only now the heavy imports: a mistyped key is answered at once.
    import torch

    from ..grpo.plan import check_job, describe_plan

    num_ranks = options.nproc_per_node
    if num_ranks is None:
        num_ranks = config.run.num_ranks or torch.cuda.device_count() or 2
    if num_ranks < 1:
        raise ValueError(f"--nproc-per-node must be at least 1, not {num_ranks}")
    check_job(config, num_ranks)
    if options.check:
        print(describe_plan(config, num_ranks))
        return 0
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
    ]
    command += ["-m", f"{PACKAGE}.integration.grpo", options.config, *options.overrides]
    sys.stdout.flush()
    os.execv(sys.executable, [*command, *(["--resume"] if options.resume else [])])


# -- doctor ----------------------------------------------------------------------------------------------

_DOCTOR_SHAPES = ((768, 768), (2304, 768), (768, 2304), (1024, 256))  # layers (out_features, in_features)
# Those that kernels care about.
_PROCESSOR_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


def _doctor(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        prog="lockstep doctor",
        description="Which kernels run here and why, and whether results are independent of the batch. Exits with 1 "
        "where they are not.",
    )
    parser.parse_args(arguments)
    import torch

    from ...kernels.attention.paged import attention_path
    from ...kernels.linear import linear
    from ...kernels.machine import native
    from ...kernels.machine.gpu import why_not_triton
    from ...kernels.self_test import self_test

    devices = [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])
    for name, value in (*_versions().items(), *_processor().items()):
        _say(name, value)
    _say("threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors")
    _say("GPU", ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))) or "none")
    _say("Triton", why_not_triton("cuda") or "serve CUDA devices")
    for source in sorted(native.KERNELS.glob("*/*.cpp")):
        name = source.relative_to(native.KERNELS).as_posix()
        library = native.load(name)
        _say(source.name, library.path if library else f"not used: {native.why_unavailable(name)}")
    dtypes = (torch.float32, torch.bfloat16)
    if native.load(linear.SOURCE):
        levels = ", ".join(f"{str(dtype).removeprefix('torch.')} {linear.native_path(dtype)}" for dtype in dtypes)
        limit = os.environ.get("LOCKSTEP_MAX_ISA")
        _say("products", levels + (f" (LOCKSTEP_MAX_ISA={limit})" if limit else ""))
    else:
        _say("products", "the library's")
    is_invariant = True
    for device in devices:
        for dtype in dtypes:
            guarantee = self_test(_DOCTOR_SHAPES, dtype, device)
            is_invariant &= guarantee.invariant
            kind = f"{device.type} {str(dtype).removeprefix('torch.')}"
            path, word = (
                attention_path(device, dtype),
                "invariant" if guarantee.invariant else "NOT INVARIANT",
            )
            _say(kind, f"attention {path}; {word}: {guarantee.reason} ({guarantee.seconds:.2f} s)")
    return 0 if is_invariant else 1


def _say(name: str, value: object) -> None:
    print(f"{name:20} {value}", flush=True)


def _versions() -> dict[str, str]:
    found = {"lockstep": version(), "python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers", "safetensors", "numpy", "triton", "deepspeed"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _processor() -> dict[str, str]:
    """Name and features, as Linux tells them."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines() if cpuinfo.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "processor": f"{fields.get('model name', platform.processor() or 'unknown')} ({platform.machine()})",
        "features": " ".join(feature for feature in _PROCESSOR_FEATURES if feature in flags) or "unknown",
    }


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "generate": (_generate, "offline generation from a file or standard input"),
    "serve": (_serve, "the HTTP surface over one engine"),
    "route": (_route, "one address for many engines"),
    "ctl": (_ctl, "pause, continue, flush, pin, look into a served engine: its verbs from a shell"),
    "train": (_train, "the GRPO job, checked and then run under torchrun"),
    "bench": (bench, f"benchmarks: {', '.join(BENCHMARKS)}"),
    "doctor": (_doctor, "which kernels run here and why"),
}

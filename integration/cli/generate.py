"""`lockstep generate`: answer every prompt of a file."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from ...rollout.config import EngineConfig
from ...rollout.sampling_params import SamplingParams
from .arguments.parser import PACKAGE, CommandParser
from .arguments.settings import named, read_settings
from .offline import job as offline
from .offline.answer_file import STANDARD
from .offline.conversations import Conversations


def run(arguments: Sequence[str]) -> int:
    """Answer the prompts, and print their number on stderr. Returns the exit code."""
    options = _parse(arguments)
    job = offline.OfflineJob(
        options.model,
        options.input,
        options.output,
        options.prompt_field,
        options.text,
        SamplingParams.from_dict(read_settings("--sampling", options.sampling)),
        named("--engine", lambda: EngineConfig.from_dict(read_settings("--engine", options.engine))),
        messages=options.messages,
        conversations=Conversations(
            options.chat, options.system, read_settings("--chat-template-kwargs", options.chat_template_kwargs)
        ),
    )
    logging.getLogger(PACKAGE).setLevel(logging.INFO)  # the engine logs its choices, with reasons
    tally = offline.generate(job)
    there = f", {tally.num_before} were there" if tally.num_before else ""
    ignored = f"; {tally.num_ignored} could not be taken, see their finish_reason" if tally.num_ignored else ""
    print(f"{tally.num_written} answers written{there}{ignored}", file=sys.stderr)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="lockstep generate",
        description="Answer every prompt of a file. Answers are appended as they finish; `index` is the number of the "
        "input line, from 0. Run the same command again after an interruption: it continues with the missing answers, "
        "and computes those again that the KV pool cut short or that could not be taken.",
    )
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a causal LM in Hugging Face format")
    parser.add_argument("--input", default=STANDARD, metavar="FILE", help="JSONL; default -, standard input")
    parser.add_argument("--output", default=STANDARD, metavar="FILE", help="JSONL; default -, standard output")
    parser.add_argument("--text", action="store_true", help="every input line is a prompt, not a JSON object")
    parser.add_argument(
        "--prompt-field",
        default="prompt",
        metavar="NAME",
        help="field of the JSON objects that has the prompt: a text, a list of token ids, or a list of messages, which "
        "the model's chat template writes; where there is no prompt, the field messages",
    )
    parser.add_argument(
        "--messages",
        default="",
        metavar="FILE",
        help="JSON file of one conversation, a list of messages, or of several, in place of --input",
    )
    parser.add_argument("--chat", action="store_true", help="a prompt that is text is a user's message")
    parser.add_argument(
        "--system",
        default="",
        metavar="TEXT",
        help="system message of conversations without one of their own; a prompt that is text is a user's message then",
    )
    parser.add_argument(
        "--chat-template-kwargs",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="variables of the chat template, or one JSON object of them: enable_thinking=false ...",
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
        help="engine settings, or one JSON object of them: kv_cache=2GiB dtype=bfloat16 max_num_seqs=64 ...",
    )
    options = parser.parse_args(arguments)
    if options.messages and (options.text or options.input != STANDARD):
        parser.error("--messages takes the place of --input, and does not go with --text")
    return options

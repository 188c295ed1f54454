"""`lockstep ctl`: the verbs of a served engine, or of a router's engines, from a shell.

Exit codes: 0 done, by every worker of a router; 1 refused by the engine or by all workers, or not healthy; 2 wrong
usage; 3 not reachable, no answer in time, or no live worker; 4 no key that allows the verb; 5 done by some of a
router's workers and not by others, or their weight versions differ: the result of each worker is listed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import httpx

from ..service_config import MEMORY_TAGS, known_tags
from .arguments.parser import CommandParser
from .ctl_answers import by_worker, checksum, in_words, message_of, report, results_of

KEY_VARIABLES = ("LOCKSTEP_ADMIN_KEY", "SGLANG_OMNI_ADMIN_KEY", "LOCKSTEP_API_KEY")
DONE, REFUSED, UNREACHABLE, UNAUTHORISED, DIVIDED = 0, 1, 3, 4, 5
MODES = ("retract", "in_place", "abort")
_GRACE_S = 5.0  # wait this much longer than the deadline that is sent, so that the server can answer why it failed


@dataclass(frozen=True)
class VerbCall:
    """One request to the server."""

    method: str
    path: str
    body: Mapping[str, object] | None = None
    query: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Verb:
    """A verb of the command line: its help, its arguments, the call that it makes, and the format of its answer."""

    what: str
    arguments: Callable[[argparse.ArgumentParser], None]
    call: Callable[[argparse.Namespace], VerbCall]
    show: Callable[[object], str]


class _Parser(CommandParser):
    """A parser that says where its options are expected: behind a verb they belong to the verb."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake on stderr and exit with 2."""
        if any(f" {option}" in message for option in self._option_string_actions if option.startswith("--")):
            message += f": options come before the verb, as in {self.prog} --url URL state"
        super().error(message)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command. The parser exits after a mistake on the command line."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:30000", help="address of the server or router; default %(default)s"
    )
    parser.add_argument(
        "--admin-key", metavar="KEY", help=f"default: the first one set of the variables {', '.join(KEY_VARIABLES)}"
    )
    parser.add_argument(
        "--timeout", type=_positive, default=60.0, metavar="SECONDS", help="longest wait; default %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print the answer as one line of JSON")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", prog=parser.prog)
    for name, verb in VERBS.items():
        verb.arguments(verbs.add_parser(name, help=verb.what, description=f"{verb.what[:1].upper()}{verb.what[1:]}."))


def run(arguments: Sequence[str]) -> int:
    """Make the call and print the answer. Returns the exit code. Raises ValueError for a bad url or argument."""
    parser = _Parser(
        prog="lockstep ctl",
        description="Call a verb of a served engine, or of all engines of a router, from a shell. Options come "
        "before the verb: lockstep ctl --url URL pause --mode retract.",
        epilog=exit_codes(),
    )
    _add_arguments(parser)
    return _make_call(parser.parse_args(arguments))


def _make_call(options: argparse.Namespace) -> int:
    try:
        url = httpx.URL(options.url)
    except httpx.InvalidURL as error:
        raise ValueError(f"--url is http://HOST:PORT, not {options.url!r}: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"--url is http://HOST:PORT, not {options.url!r}")
    verb = VERBS[options.verb]
    call = verb.call(options)
    key = options.admin_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ValueError("the key must be of printable ASCII characters, as HTTP has it")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = None if call.body is None else {"timeout_s": options.timeout, **call.body}
    try:
        with httpx.Client(trust_env=False, timeout=options.timeout + _GRACE_S, headers=headers) as client:
            response = client.request(
                call.method, options.url.rstrip("/") + call.path, json=body, params=dict(call.query or {})
            )
    except httpx.HTTPError as error:
        return _fail(options, UNREACHABLE, f"{options.url} does not answer: {error or type(error).__name__}")
    answer = _read(response)
    results = results_of(answer)
    if not response.is_success:
        code = _code_of(response.status_code, answer, results)
        return _fail(options, code, message_of(response.status_code, answer), answer, results)
    if options.json:
        print(json.dumps(answer), flush=True)
    else:
        print(by_worker(results, verb.show) if results else verb.show(answer), flush=True)
    return DONE


def _code_of(status: int, answer: object, results: Sequence[Mapping[str, object]]) -> int:
    """Choose the exit code for an error answer."""
    if status in (401, 403):
        return UNAUTHORISED
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict) and error.get("type") == "no_workers":
        return UNREACHABLE
    if any(one.get("success") for one in results):
        return DIVIDED
    return UNREACHABLE if results and all(one.get("status_code") is None for one in results) else REFUSED


def _read(response: httpx.Response) -> object:
    try:
        return response.json() if response.content else None
    except ValueError:
        return response.text.strip()


def _fail(
    options: argparse.Namespace, code: int, message: str, answer: object = None,
    results: Sequence[Mapping[str, object]] = (),
) -> int:  # fmt: skip
    if options.json:
        print(json.dumps({"success": False, "exit_code": code, "message": message, "answer": answer}), flush=True)
    print(f"lockstep ctl: {options.verb}: {message}", file=sys.stderr, flush=True)
    if results and not options.json:
        print(by_worker(results, VERBS[options.verb].show), file=sys.stderr, flush=True)
    return code


# -- arguments and calls -----------------------------------------------------------------------------------------------


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 7 * 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers separated by commas") from None


def _nothing(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def _pause_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", choices=MODES, default="retract", help="default %(default)s")
    parser.add_argument("--ttl", type=_positive, metavar="SECONDS", help="continue generation after this time")


def _abort_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("rid", nargs="?", help="id of the request")
    which.add_argument("--all", action="store_true", help="abort all requests that have not ended")


def _prompt_arguments(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the cached blocks of this text")
    prompt.add_argument("--ids", type=_ids, metavar="1,2,3", help="the cached blocks of these token ids")


def _pin_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hashes", nargs="*", type=int, metavar="HASH", help="hashes of cached blocks; see `cache`")
    _prompt_arguments(parser)
    parser.add_argument("--owner", help="owner of the pins")
    parser.add_argument("--ttl", type=_positive, metavar="SECONDS", help="lift the pins after this time")


def _unpin_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hashes", nargs="+", type=int, metavar="HASH", help="hashes of pinned blocks; see `cache`")
    parser.add_argument("--owner", help="owner of the pins")


def _cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depth", type=int, metavar="LEVELS", help="largest number of levels to show")
    parser.add_argument("--under", type=int, metavar="HASH", help="show only the blocks below this block")
    _prompt_arguments(parser)


def _version_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("new", nargs="?", help="new label of the weights; without it, print the present one")
    parser.add_argument("--abort-all", action="store_true", help="abort all requests first")


def _tags_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tags", nargs="*", metavar="TAG", help=f"some of {', '.join(MEMORY_TAGS)}; default: all")


def _prompt(options: argparse.Namespace) -> dict[str, object]:
    if options.prompt is not None:
        return {"text": options.prompt}
    return {} if options.ids is None else {"token_ids": options.ids}


def _given(**fields: object) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _abort(options: argparse.Namespace) -> VerbCall:
    arguments = {"abort_all": True} if options.all else {"rid": options.rid}
    return VerbCall("POST", "/abort_request", arguments)


def _pin(options: argparse.Namespace) -> VerbCall:
    prompt = _prompt(options)
    if bool(options.hashes) == bool(prompt):
        raise ValueError("pin needs either block hashes, or --prompt, or --ids")
    common = _given(owner=options.owner, ttl_seconds=options.ttl)
    if prompt:
        return VerbCall("POST", "/hicache/pin_prefix", prompt | common)
    return VerbCall("POST", "/hicache/pin_blocks", {"block_hashes": options.hashes} | common)


def _cache(options: argparse.Namespace) -> VerbCall:
    shape = "json" if options.json else "text"
    body = _given(depth=options.depth, under=options.under, format=shape) | _prompt(options)
    return VerbCall("POST", "/hicache/cache_tree", body)


def _version(options: argparse.Namespace) -> VerbCall:
    if options.new is None:
        return VerbCall("GET", "/get_weight_version")
    fields = {"new_version": options.new, "abort_all_requests": options.abort_all}
    return VerbCall("POST", "/update_weight_version", fields)


def _tags(path: str) -> Callable[[argparse.Namespace], VerbCall]:
    def call(options: argparse.Namespace) -> VerbCall:
        known_tags(options.tags)
        return VerbCall("POST", path, {"tags": options.tags})

    return call


VERBS: dict[str, Verb] = {
    "health": Verb(
        "check that the engine is healthy", _nothing, lambda _: VerbCall("GET", "/health"), lambda _: "healthy"
    ),
    "state": Verb("show the engine's state", _nothing, lambda _: VerbCall("GET", "/state"), in_words),
    "sequences": Verb(
        "list running and waiting sequences, with their newest tokens", _nothing,
        lambda _: VerbCall("GET", "/lockstep/sequences"), in_words,
    ),
    "pause": Verb(
        "run no more steps until `continue`", _pause_arguments,
        lambda o: VerbCall("POST", "/pause_generation", _given(mode=o.mode, ttl=o.ttl)), report,
    ),
    "continue": Verb("end a pause", _nothing, lambda _: VerbCall("POST", "/continue_generation", {}), report),
    "flush": Verb("empty the prefix cache", _nothing, lambda _: VerbCall("POST", "/flush_cache", {}), report),
    "abort": Verb("end requests with the tokens that they have", _abort_arguments, _abort, report),
    "checksum": Verb(
        "compute digests of the present weights", _nothing,
        lambda _: VerbCall("POST", "/weights_checker", {"action": "checksum"}), checksum,
    ),
    "version": Verb("print the weight version, or set a new label for it", _version_arguments, _version, report),
    "pin": Verb("keep cached blocks from eviction", _pin_arguments, _pin, report),
    "unpin": Verb(
        "lift one pin of each block", _unpin_arguments,
        lambda o: VerbCall("POST", "/hicache/unpin_blocks", {"block_hashes": o.hashes} | _given(owner=o.owner)), report,
    ),
    "cache": Verb("show the prefix cache, or the cached part of a prompt", _cache_arguments, _cache, str),
    "release": Verb("release memory", _tags_arguments, _tags("/release_memory_occupation"), report),
    "resume": Verb("allocate released memory again", _tags_arguments, _tags("/resume_memory_occupation"), report),
}  # fmt: skip


def exit_codes(docstring: str | None = __doc__) -> str:
    """Return the text of --help about exit codes."""
    assert docstring is not None
    return " ".join(docstring.split("\n\n")[1].split())

"""Agents as they are: a command for each episode, which finds the model by its environment variables.

The command gets the row's prompt as its last argument, a folder of its own to work in, and no secret of the job. A
reward function looks at what it did.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ...user_code import imported
from ..episode import Episode, Turn
from ..served import ServedModel
from ..session import Session

# All that a command gets of the job's environment: the rest has keys, and tells programs that they are a rank.
PASSED = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
_MOST_OUTPUT = 1 << 20  # last bytes of what a command prints that are kept
_SHOWN = 2000  # of them in an error
_DRAIN_S = 1.0  # for output that a process which outlived the command still holds open

_at_once: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@dataclass(frozen=True)
class AgentRun:
    """A command that has ended, for the reward function."""

    returncode: int | None  # None: it ran out of time
    stdout: str  # its last MiB
    stderr: str  # likewise
    folder: Path  # in which it worked; it is removed after the reward
    turns: Sequence[Turn]  # the model's answers, in the order in which they ended


async def run(
    row: Mapping[str, Any], session: Session, *, command: str | Sequence[str] = (), reward: str = "",
    prompt_field: str = "prompt", files: str = "", env: Mapping[str, str] | None = None, timeout_s: float = 600.0,
    at_a_time: int = 8,
) -> Episode:  # fmt: skip
    """Run a command on the row's prompt.

    command: a list, or a text as for a shell, which none reads; the prompt is its last argument, or stands where one
    has "{prompt}". Arguments that are files of the job's folder, and not of `files`, become their whole paths.
    reward: "module:function" or "file.py:function", called with the row and an `AgentRun`, async or not; it returns a
    number or components by name. files: a folder, a copy of which the command works in. env: further variables, for all
    commands. timeout_s: seconds after which it is killed, with all processes of its group.
    at_a_time: commands that run at a time, on each rank. Raises ValueError for wrong options, for a command that cannot
    be run, and for one that has asked the model nothing.
    """
    words, function = _checked(command, reward, files, at_a_time)
    words = [_whole_path(word, files) for word in words]
    if not isinstance(prompt := row.get(prompt_field), str):
        raise ValueError(f"the environment agent needs a text in the row's {prompt_field!r}, not {prompt!r:.200}")
    async with _place(at_a_time), _folder(files) as folder:
        async with session.served() as model:
            more = {name: str(value) for name, value in (env or {}).items()}
            variables = {**_variables(folder), **model.environment, **more}
            with session.outside(timeout_s):
                done = await _run(_with_prompt(words, prompt), variables, folder / "work", timeout_s, model)
        if not done.turns:
            how = "ran out of time" if done.returncode is None else f"ended with {done.returncode}"
            raise ValueError(f"the agent {how} and had asked the model nothing: {done.stderr[-_SHOWN:].strip()}")
        value = function(row, done) if inspect.iscoroutinefunction(function) else asyncio.to_thread(function, row, done)
        return session.episode(await value)


def _checked(command: str | Sequence[str], reward: str, files: str, at_a_time: int) -> tuple[list[str], Any]:
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    if not words:
        raise ValueError('the environment agent needs a command: environment_options = { command = "my-agent" }')
    if not reward:
        raise ValueError("the environment agent needs a reward: 'module:function' or 'file.py:function'")
    if files and not Path(files).is_dir():
        raise ValueError(f"the environment agent: files={files!r} is no folder in {Path.cwd()}")
    if at_a_time < 1:
        raise ValueError(f"the environment agent needs at_a_time of at least 1, not {at_a_time}")
    return words, _reward(reward)


@cache
def _reward(location: str) -> Any:
    found = imported(location, "the reward of an agent")
    if not callable(found):
        raise ValueError(f"the reward of an agent {location!r}: a {type(found).__name__} cannot be called")
    return found


def _place(at_a_time: int) -> asyncio.Semaphore:
    """Return the places for commands in this event loop."""
    return _at_once.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(at_a_time))


@contextlib.asynccontextmanager
async def _folder(files: str) -> AsyncIterator[Path]:
    """Make a folder with a home and a place to work in, and remove it in the end."""
    made = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="lockstep-agent-", ignore_cleanup_errors=True)
    folder = Path(made.name)
    try:
        (folder / "home").mkdir()
        if files:
            copying = asyncio.ensure_future(asyncio.to_thread(shutil.copytree, files, folder / "work", symlinks=True))
            try:
                await asyncio.shield(copying)
            except asyncio.CancelledError:
                await asyncio.wait([copying])  # what is copied after the folder's end would stay
                raise
        else:
            (folder / "work").mkdir()
        yield folder
    finally:
        await asyncio.to_thread(made.cleanup)


def _whole_path(word: str, files: str) -> str:
    is_ours = os.sep in word or word.endswith(".py")  # else a name such as "test" could be meant otherwise
    if is_ours and Path(word).is_file() and not (files and (Path(files) / word).exists()):
        return str(Path(word).resolve())
    return word


def _variables(folder: Path) -> dict[str, str]:
    """Return what a command gets of the job's environment, in which `python` is the job's own."""
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    path = os.pathsep.join([os.path.dirname(sys.executable), passed.get("PATH", os.defpath)])
    return {**passed, "PATH": path, "HOME": str(folder / "home")}


def _with_prompt(words: Sequence[str], prompt: str) -> list[str]:
    if any("{prompt}" in word for word in words):
        return [word.replace("{prompt}", prompt) for word in words]
    return [*words, prompt]


async def _run(
    words: Sequence[str], variables: Mapping[str, str], folder: Path, timeout_s: float, model: ServedModel
) -> AgentRun:
    try:
        process = await asyncio.create_subprocess_exec(
            *words, cwd=folder, env=dict(variables), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:  # ValueError: a NUL in the prompt
        raise ValueError(f"the agent {words[0]!r} cannot be run: {error}") from error
    assert process.stdout is not None and process.stderr is not None
    outputs = [bytearray(), bytearray()]
    readers = [
        asyncio.create_task(_read(stream, output))
        for stream, output in zip((process.stdout, process.stderr), outputs, strict=True)
    ]
    code = None
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                code = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it has started ends with it
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.wait(readers, timeout=_DRAIN_S)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    said, told = (bytes(output).decode("utf-8", "replace") for output in outputs)
    return AgentRun(code, said, told, folder, tuple(model.turns))


async def _read(stream: asyncio.StreamReader, into: bytearray) -> None:
    while data := await stream.read(1 << 16):
        into += data
        if len(into) > 2 * _MOST_OUTPUT:
            del into[:-_MOST_OUTPUT]
    del into[:-_MOST_OUTPUT]

"""The file of answers of an offline job: read once at the start, then appended to."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ....kernels.sampling.definition import DRAW_DEFINITION
from ...failures import files_of

STANDARD = "-"  # as a file name: standard input or output
# Other engine settings change speed and memory, never a result.
RESULT_SETTINGS = ("dtype", "invariant", "max_model_len", "seed")
# Nor do these where they have their defaults: then they are left out of the hash, so that it is that of older answers.
MORE_SETTINGS = ("k_blocks",)
# Likewise of answers that a grammar constrains: those of rollout/receipt.py, whose import is heavy (a test compares
# them), and the mode where the request names none.
GRAMMAR_SETTINGS = ("grammar_any_whitespace", "jump_forward_max_rollback", "jump_forward_max_blocks", "block_size")
MODE = "jump_forward"
_MADE_FROM = {  # key of an answer's sources: words for the error when its hash or number differs
    "prompt": "another prompt",
    "sampling": "other --sampling settings",
    "engine": f"other --engine settings (of {', '.join([*RESULT_SETTINGS, *MORE_SETTINGS])}; "
    f"with a grammar also of {', '.join([MODE, *GRAMMAR_SETTINGS])})",
    "weights": "other weights, or by another chat template",
    "model": "another configuration or tokenizer of the model, or other end-of-sequence tokens",
    "draws": f"draws by another definition (now {DRAW_DEFINITION})",
}
# Of answers of older versions, which did not write these.
_UNKNOWN = {"draws": "1", "model": ""}  # definitions had no number; a model is compared with nothing, and so refused
_GO_ON = "mend that, then run the same command again: it computes the answers that are missing"
_FIRST_BYTES = b'{"index": '  # every answer starts with them


class AnswerFile:
    """The output file: read once at the start, then appended to. Only one process at a time can open it."""

    def __init__(self, name: str) -> None:
        """Open or make the file, and drop a last line that an interruption cut off.

        Raises ValueError, before anything is changed, if the file has other lines than answers, or if another process
        writes to it.
        """
        self.name = name
        self.answers: dict[tuple[int, int], Mapping[str, str]] = {}  # (index, sample): hashes of the answer's sources
        self._line_numbers: dict[tuple[int, int], int] = {}
        self._unfinished: set[tuple[int, int]] = set()  # answers that a larger KV pool may give otherwise
        self._replaced: list[BinaryIO] = []  # files that this name had; their locks stay, for runs that opened them
        if name == STANDARD:
            if sys.stdout is None:
                raise ValueError("standard output is closed: name a file with --output")
            self._file: BinaryIO = sys.stdout.buffer
            return
        if os.path.exists(name) and not os.path.isfile(name):
            raise ValueError(f"--output {name}: is no regular file; --output - writes to standard output")
        try:
            self._file = open(name, "a+b")  # noqa: SIM115 - open as long as this object is used
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"--output {name}: another run is writing to it") from error
        except OSError as error:
            raise ValueError(f"--output {name}: cannot be written: {error.strerror}") from error
        self._file.seek(0)
        self._file.truncate(self._read(self._file))

    def _read(self, lines: Iterable[bytes]) -> int:
        """Note the answer of every complete line. Returns the number of bytes of these lines."""
        num_bytes = 0
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):  # the last one
                if number == 1 and not _FIRST_BYTES.startswith(line[: len(_FIRST_BYTES)]):
                    raise ValueError(f"--output {self.name}, line 1: not an answer of lockstep generate")
                break
            num_bytes += len(line)
            try:
                answer = json.loads(line)
                key = (answer["index"], answer["sample"])
                sources = {**_UNKNOWN, **answer["made_from"]}
                made_from = {name: sys.intern(str(sources[name])) for name in _MADE_FROM}  # most lines have the same
                is_final = _is_final(answer["finish_reason"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(f"--output {self.name}, line {number}: not an answer of lockstep generate") from error
            self.answers[key], self._line_numbers[key] = made_from, number
            if not is_final:
                self._unfinished.add(key)
        return num_bytes

    def compare(self, prompts: Mapping[int, str], num_samples: int, settings: Mapping[str, str]) -> None:
        """Raise ValueError for the first answer with other hashes. prompts: hashes by the number of the input line.
        `settings` may lack hashes that are unknown yet."""
        for (index, sample), made_from in self.answers.items():
            where = f"--output {self.name}, line {self._line_numbers[index, sample]}"
            if index not in prompts or sample >= num_samples:
                raise ValueError(f"{where}: answers sample {sample} of input line {index + 1}, which is not asked for")
            now = {"prompt": prompts[index], **settings}
            for name in _MADE_FROM:
                if name in now and now[name] != made_from[name]:
                    changed = f"input line {index + 1}: " if name == "prompt" else ""
                    old = "" if made_from[name] else " (an older version did not write which)"
                    raise ValueError(f"{where}: {changed}made from {_MADE_FROM[name]}{old}; choose another --output")

    def drop_unfinished(self) -> None:
        """Remove the answers that the settings and the weights alone have not ended, so that they are computed again.
        The others are in the file at any time, whatever interrupts this. Raises FileFailed."""
        if not self._unfinished:
            return
        dropped = {self._line_numbers[key] for key in self._unfinished}
        path = Path(self.name).resolve()
        partial = path.with_name(f".{path.name}.partial")
        with files_of(self._shown, advice=_GO_ON):
            before = self._file
            before.seek(0)
            file = open(partial, "w+b")  # noqa: SIM115 - open as long as this object is used
            self._replaced.append(before)
            self._file = file
            fcntl.flock(file, fcntl.LOCK_EX)
            file.writelines(line for number, line in enumerate(before, start=1) if number not in dropped)
            file.flush()
            os.fsync(file.fileno())
            shutil.copymode(path, partial)
            os.replace(partial, path)
        for key in self._unfinished:
            del self.answers[key]
        self._unfinished.clear()

    def append(self, answers: Iterable[Mapping[str, object]]) -> None:
        """Write answers to the operating system, so that they survive a kill of this process. Raises FileFailed."""
        with files_of(self._shown, advice=_GO_ON):
            self._file.write(b"".join(json.dumps(answer).encode() + b"\n" for answer in answers))
            self._file.flush()

    def close(self) -> None:
        """Flush the file to the disk, and release its lock. Raises FileFailed."""
        with files_of(self._shown, advice=_GO_ON):
            try:
                self._file.flush()
                if self.name != STANDARD:
                    os.fsync(self._file.fileno())
            finally:
                for file in self._replaced:
                    file.close()
                if self.name != STANDARD:
                    self._file.close()

    @property
    def _shown(self) -> Path:
        return Path("standard output" if self.name == STANDARD else self.name)


def _is_final(reason: Mapping[str, Any]) -> bool:
    """Return whether an answer ended so that it ends there in a KV pool of any size."""
    return reason["type"] == "stop" or (reason["type"] == "length" and "message" not in reason)

"""A server of our own under attack: `lockstep serve` on a small random model, in a process that faults reach."""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from lockstep.tests.torture.wire import Address

API_KEY, ADMIN_KEY = "the-ordinary-key", "the-admin-key"
START_S, END_S = 120.0, 30.0
HEADROOM = 3 << 30  # bytes of address space beyond the start: the machine survives a server that swells
CLOCK_SOURCE = Path(__file__).parent / "clock.c"
SETTINGS = """
[service]
weight_timeout_s = 2
"""


class Process:
    """A process of a server on this machine: its limits, its signals and its clock."""

    def __init__(self, pid: int, clock: Path | None = None) -> None:
        self.pid, self._clock = pid, clock

    @property
    def is_alive(self) -> bool:
        return Path(f"/proc/{self.pid}/fd").exists()

    @property
    def has_clock(self) -> bool:
        return self._clock is not None

    def ending(self) -> str:
        """Say how the process ended, and its last words."""
        return f"process {self.pid} is gone"

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def limit(self, what: int, num_bytes: int) -> None:
        """Set a soft limit of the process; -1: none."""
        _, hard = resource.prlimit(self.pid, what)
        resource.prlimit(self.pid, what, (num_bytes, hard))

    def cap_memory(self, headroom: int = HEADROOM) -> None:
        """Limit the address space to the present size and `headroom` bytes."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[0])
        self.limit(resource.RLIMIT_AS, pages * resource.getpagesize() + headroom)

    def move_clock(self, seconds: int) -> None:
        """Move the wall clock of the process by this much from the true time."""
        assert self._clock is not None
        with open(self._clock, "r+b") as file:
            file.write(struct.pack("l", seconds))


class OwnServer(Process):
    """`lockstep serve` with both keys. Writes its log to `server.log` in the folder."""

    def __init__(self, folder: Path, engine: Sequence[str] = ()) -> None:
        """Start the process. engine: further settings of its engine, `name=value`."""
        self.folder, self.model_folder = folder, folder / "model"
        _save_model(self.model_folder)
        (folder / "server.toml").write_text(SETTINGS)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "LOCKSTEP_API_KEY": API_KEY,
            "LOCKSTEP_ADMIN_KEY": ADMIN_KEY,
        }
        clock = _build_clock(folder, environment)
        command = [sys.executable, "-m", "lockstep.integration.cli", "serve", "--model", str(self.model_folder)]
        command += ["--config", str(folder / "server.toml"), "--port", "0", "--engine", "kv_cache=512 blocks"]
        command += ["max_num_seqs=16", f"trace={folder / 'trace.json'}", *engine]
        self._process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, env=environment)
        super().__init__(self._process.pid, clock)
        self._last: deque[str] = deque(maxlen=60)
        self._announced, self._url = threading.Event(), ""
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def wait(self) -> Address:
        """Return the address when the server listens. Raises RuntimeError where it does not start."""
        if not self._announced.wait(START_S) or not self._url:
            self.end()
            raise RuntimeError("the server did not start:\n" + self.log_tail())
        return Address(self._url, API_KEY, ADMIN_KEY)

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        with open(self.folder / "server.log", "w") as log:
            for line in self._process.stderr:
                log.write(line)
                log.flush()
                self._last.append(line)
                if " at http" in line and not self._url:
                    self._url = line.split()[-1]
                    self._announced.set()
        self._announced.set()  # it has ended

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def log_tail(self) -> str:
        return "".join(self._last)

    def ending(self) -> str:
        code = self._process.wait(END_S)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}; its last words: {''.join(self._last)[-600:]}"

    def end(self) -> int:
        """Ask the process to end; kill it after a while. Returns its exit code."""
        self._process.terminate()
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if threading.current_thread() is not self._reader:
            self._reader.join(END_S)
        return code


def _save_model(folder: Path) -> None:
    from lockstep.tests.support.bpe_tokenizer import train_tokenizer
    from lockstep.tests.support.random_models import random_model

    model = random_model("qwen3", vocab_size=1024, max_position_embeddings=1024, eos_token_id=0)
    model.save_pretrained(folder)
    train_tokenizer().save_pretrained(folder)


def _build_clock(folder: Path, environment: dict[str, str]) -> Path | None:
    """Compile the library that moves a process's clock, and add it to the environment; None without a compiler."""
    library, offset = folder / "clock.so", folder / "clock"
    command: Sequence[str] = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(CLOCK_SOURCE), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no clock will jump, since cc failed: {error}", file=sys.stderr)
        return None
    offset.write_bytes(struct.pack("l", 0))
    environment |= {"LD_PRELOAD": str(library), "TORTURE_CLOCK": str(offset)}
    return offset

"""C++ kernels, compiled at first use and loaded with ctypes (which releases the GIL during a call).

A library is stored in the folder of `cache_folder.py`, under a name that is a digest of its sources, flags, compiler
and processor. A library is code: a folder or file that another user owns or can write to is refused.
`LOCKSTEP_NATIVE=0` switches native code off. `LOCKSTEP_MAX_ISA`, one of `ISA_LEVELS`, forbids all kernels the
instructions above that level: for tests, and to make one machine compute as a less capable one would.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .cache_folder import NoHome, cache_folder, check_owner, make_folder, remove_abandoned
from .switches import is_on

logger = logging.getLogger(__name__)

KERNELS = Path(__file__).parent.parent  # the root of sources and of the paths in #include
INCLUDE_FLAG = f"-I{KERNELS}"  # not in FLAGS, so that checkouts share compiled libraries

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fopenmp")


_NONE_LEFT = -(1 << 63)  # memory::NONE_LEFT of memory.h

# From the least to the most capable; _WITHOUT: flag that forbids the next level. "plain" is the compiler's baseline.
ISA_LEVELS = ("plain", "avx2", "avx512", "avx512_bf16", "amx")
_WITHOUT = {"avx2": "-mno-avx512f", "avx512": "-mno-avx512bf16", "avx512_bf16": "-mno-amx-bf16"}


class NativeUnavailable(Exception):
    """No native library: native code is switched off, there is no compiler, or compiling failed."""


class BuildFailed(NativeUnavailable):
    """No native library though there is a compiler: it failed, or its library cannot be kept or loaded."""


@dataclass(frozen=True)
class NativeLibrary:
    """A compiled and loaded library."""

    path: Path
    compile_seconds: float  # 0.0 when it came from the cache
    handle: ctypes.CDLL

    def function(self, name: str, argument_types: Sequence[type], result_type: type | None) -> Callable[..., Any]:
        """Return the exported C function `name` with its argument and result types set."""
        function = getattr(self.handle, name)
        function.argtypes, function.restype = argument_types, result_type
        if (packed := getattr(self.handle, f"{name}_packed", None)) is not None:
            setattr(function, _PACKED, ctypes.cast(packed, ctypes.c_void_p).value)
        return function


def packed_of(function: Callable[..., Any]) -> int | None:
    """Return the address of the variant of a library's function that takes its arguments packed (packed.h), if any."""
    address: int | None = getattr(function, _PACKED, None)
    return address


_PACKED = "packed_address"  # an attribute of functions
_lock = threading.Lock()
_loaded: dict[str, NativeLibrary | NativeUnavailable] = {}


def load(source_name: str) -> NativeLibrary | None:
    """Return the library built from `source_name`, e.g. "linear/linear.cpp", or None (see `why_unavailable`).

    The first call in a process may compile (seconds). Its answer, library or None, is fixed for the whole process.
    """
    found = _look_up(source_name)
    return found if isinstance(found, NativeLibrary) else None


def function(
    source_name: str, name: str, argument_types: Sequence[type], result_type: type | None = None
) -> Callable[..., Any] | None:
    """Return the typed function `name` of the library built from `source_name`, or None where there is no library."""
    library = load(source_name)
    return None if library is None else library.function(name, argument_types, result_type)


def why_unavailable(source_name: str) -> str | None:
    """Return the reason why there is no library, or None where there is one."""
    found = _look_up(source_name)
    return str(found) if isinstance(found, NativeUnavailable) else None


def lacking() -> list[str]:
    """Return the sources that this process has asked for and has no library of, sorted."""
    return sorted(name for name, found in _loaded.copy().items() if isinstance(found, NativeUnavailable))


def _look_up(source_name: str) -> NativeLibrary | NativeUnavailable:
    found = _loaded.get(source_name)
    if found is not None:
        return found
    with _lock:
        if source_name not in _loaded:
            try:
                _loaded[source_name] = library = build(KERNELS / source_name, os.environ)
                logger.info("native %s: %s (compiled in %.1f s)", source_name, library.path, library.compile_seconds)
            except NativeUnavailable as reason:
                _loaded[source_name] = reason
                log = logger.warning if isinstance(reason, BuildFailed) else logger.info
                log("native %s is not available, the PyTorch path is used: %s", source_name, reason)
        return _loaded[source_name]


def run(function: Callable[..., Any], *arguments: Any, kept: object = None) -> Any:
    """Call a function of a library; all kernels make their calls here.

    kept: the objects that the arguments point into, if nothing else holds them. The listener of this thread
    (`recorded_by`), if any, receives the call before it is made. Raises MemoryError where there is none for a kernel's
    scratch; what it computes is then incomplete.
    """
    if _listening.to is not None:
        _listening.to(function, arguments, kept)
    result = function(*arguments)
    if result == _NONE_LEFT:
        raise MemoryError(f"{function.__name__} finds no memory for its scratch")
    return result


@contextmanager
def recorded_by(listener: Callable[[Callable[..., Any], tuple[Any, ...], object], None]) -> Iterator[None]:
    """Pass each `run` of this thread to the listener: the function, its arguments and `kept`."""
    before, _listening.to = _listening.to, listener
    try:
        yield
    finally:
        _listening.to = before


class _Listening(threading.local):
    to: Callable[[Callable[..., Any], tuple[Any, ...], object], None] | None = None


_listening = _Listening()


def build(source: Path, environ: Mapping[str, str], more_flags: Sequence[str] = ()) -> NativeLibrary:
    """Compile `source` unless the cache has its library, and load it. Several processes may do so at once.

    more_flags: put after FLAGS, so that they override them. Raises NativeUnavailable with the cause, and UnsafeCache.
    """
    if not is_on("LOCKSTEP_NATIVE", environ):
        raise NativeUnavailable("switched off by LOCKSTEP_NATIVE=0")
    compiler = find_compiler(environ)
    version = compiler_version(compiler)
    flags = [*compile_flags(environ), *more_flags]
    openmp = _openmp_link_flags(is_clang="clang" in version)
    try:
        folder = cache_folder(environ)
    except NoHome as error:
        raise BuildFailed(str(error)) from error
    path = folder / f"{source.stem}-{_digest(source, [*compiler[1:], version], [*flags, *openmp])}.so"
    started = time.perf_counter()
    _make_folder(folder)
    if path.exists():
        check_owner(path)
        try:
            return NativeLibrary(path, 0.0, ctypes.CDLL(str(path)))
        except OSError as error:
            logger.warning("%s is damaged and is compiled anew: %s", path, error)
    _compile(compiler, source, flags, openmp, path)
    check_owner(path)
    try:
        return NativeLibrary(path, time.perf_counter() - started, ctypes.CDLL(str(path)))
    except OSError as error:
        raise BuildFailed(f"{path} does not load: {error}") from error


def compile_flags(environ: Mapping[str, str]) -> list[str]:
    """Return FLAGS less the instructions that `LOCKSTEP_MAX_ISA` forbids. Raises ValueError for an unknown level."""
    level = environ.get("LOCKSTEP_MAX_ISA") or ISA_LEVELS[-1]
    if level not in ISA_LEVELS:
        raise ValueError(f"LOCKSTEP_MAX_ISA is {level!r}, not one of {', '.join(ISA_LEVELS)}")
    if level == "plain":
        return [flag for flag in FLAGS if flag != "-march=native"]
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return list(FLAGS)  # the levels name instructions of x86 only
    above = ISA_LEVELS[ISA_LEVELS.index(level) : -1]
    return [*FLAGS, *(_WITHOUT[name] for name in above)]


def find_compiler(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command $CXX, which may have arguments, else g++, else clang++, with the path of its program. Raises
    NativeUnavailable when there is none, and BuildFailed for a $CXX that is none."""
    own = environ.get("CXX", "")
    try:
        commands = [shlex.split(own)] if own.strip() else [["g++"], ["clang++"]]
    except ValueError as error:
        raise BuildFailed(f"CXX is {own!r}, which is no command: {error}") from error
    for program, *arguments in commands:
        path = shutil.which(program, path=environ.get("PATH"))
        if path is not None:
            return path, *arguments
    kind = BuildFailed if own.strip() else NativeUnavailable
    raise kind(f"no C++ compiler: {' and '.join(command[0] for command in commands)} not found on PATH")


def _make_folder(folder: Path) -> None:
    try:
        make_folder(folder)
    except OSError as error:
        raise BuildFailed(f"the cache folder {folder} cannot be made: {error}") from error


@cache
def compiler_version(compiler: tuple[str, ...]) -> str:
    """Return what the compiler of that command says of itself. Raises NativeUnavailable."""
    return _run([*compiler, "--version"])


def _openmp_link_flags(is_clang: bool) -> list[str]:
    """Return flags to link the libgomp that torch has loaded: two runtimes would keep two thread pools on the cores."""
    torch_root = Path(torch.__file__).parent
    bundled = sorted([*torch_root.glob("lib/libgomp*.so*"), *torch_root.with_name("torch.libs").glob("libgomp*.so*")])
    if bundled and not is_clang:  # code from clang's -fopenmp needs clang's own runtime
        return [str(bundled[0])]
    return ["-fopenmp"]


def _digest(source: Path, compiler: list[str], flags: list[str]) -> str:
    """Name a library. compiler: the arguments of its command, and what it says of itself."""
    parts = [*flags, *compiler, processor()]
    parts += [file.read_text() for file in [source, *sorted({*source.parent.glob("*.h"), *KERNELS.rglob("*.h")})]]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def processor() -> str:
    """Describe the processor as -march=native sees it: a shared cache must not serve another machine's instructions."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    fields = ("model name", "cpu family", "model", "CPU part", "flags", "Features")
    first = cpuinfo.read_text().split("\n\n")[0].splitlines()
    return platform.machine() + "".join(sorted(line for line in first if line.split("\t")[0].strip() in fields))


def _compile(compiler: tuple[str, ...], source: Path, flags: list[str], link_flags: list[str], path: Path) -> None:
    try:
        remove_abandoned(path)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.stem}-") as work:
            compiled, linked = f"{work}/kernel.o", f"{work}/kernel.so"
            _run([*compiler, *flags, INCLUDE_FLAG, "-c", str(source), "-o", compiled])
            _run([*compiler, "-shared", compiled, "-o", linked, *link_flags])
            os.chmod(linked, 0o755)  # whatever the umask allows others
            with open(linked, "rb") as library:
                os.fsync(library.fileno())  # after a loss of power the name stands for the whole library, too
            os.replace(linked, path)  # atomic: another rank sees the whole library or none
    except OSError as error:
        raise BuildFailed(f"the cache folder {path.parent} cannot be written: {error}") from error


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildFailed(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        raise BuildFailed(f"`{' '.join(command)}` failed:\n{done.stderr.strip()[:2000]}")
    return done.stdout

"""Tests of builds of native kernels: success, failure with its reason, and several builds at once."""

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lockstep.kernels.machine import native
from lockstep.kernels.machine.cache_folder import UnsafeCache
from lockstep.kernels.machine.switches import is_on

SOURCE = 'extern "C" long answer(long x) { return x + 42; }\n'


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "CXX", "HOME") if name in os.environ}
    return {**kept, "LOCKSTEP_CACHE_DIR": str(tmp_path / "cache"), **more}


def has_compiler() -> bool:
    try:
        native.find_compiler(os.environ)
    except native.NativeUnavailable:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler here")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.cpp"
    path.write_text(SOURCE)
    return path


def answer(library: native.NativeLibrary) -> int:
    return library.function("answer", [ctypes.c_long], ctypes.c_long)(0)


@needs_compiler
def test_a_library_is_built_once_and_then_found_in_the_cache(source: Path, tmp_path: Path) -> None:
    first = native.build(source, environment(tmp_path))
    second = native.build(source, environment(tmp_path))
    assert answer(first) == answer(second) == 42
    assert first.compile_seconds > 0 and second.compile_seconds == 0.0
    assert first.path == second.path and first.path.parent == tmp_path / "cache"


@needs_compiler
def test_a_change_of_source_or_header_builds_anew(source: Path, tmp_path: Path) -> None:
    paths = [native.build(source, environment(tmp_path)).path]
    source.write_text(SOURCE.replace("42", "43"))
    changed = native.build(source, environment(tmp_path))
    assert answer(changed) == 43
    paths.append(changed.path)
    source.with_name("kernel.h").write_text("// another header\n")
    paths.append(native.build(source, environment(tmp_path)).path)
    assert len(set(paths)) == 3


@needs_compiler
def test_many_may_build_at_once_and_leave_nothing_but_the_library(source: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(lambda _: native.build(source, environment(tmp_path)), range(4)))
    assert [answer(library) for library in libraries] == [42] * 4
    assert list((tmp_path / "cache").iterdir()) == [libraries[0].path]


@needs_compiler
def test_the_default_cache_follows_xdg(source: Path, tmp_path: Path) -> None:
    environ = environment(tmp_path, XDG_CACHE_HOME=str(tmp_path / "xdg"))
    del environ["LOCKSTEP_CACHE_DIR"]
    assert native.build(source, environ).path.parent == tmp_path / "xdg" / "lockstep"


@needs_compiler
def test_a_compile_error_is_quoted(source: Path, tmp_path: Path) -> None:
    source.write_text("this is no C++")
    with pytest.raises(native.NativeUnavailable, match=r"(?s)failed:.*error.*this"):
        native.build(source, environment(tmp_path))


@needs_compiler
@pytest.mark.parametrize("damaged", [b"", b"no library"])
def test_a_damaged_library_is_compiled_anew(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    other = tmp_path / "other"  # of this cache the process has no library loaded
    other.mkdir(mode=0o700)
    path = other / native.build(source, environment(tmp_path)).path.name
    path.write_bytes(damaged)
    path.chmod(0o755)
    again = native.build(source, environment(tmp_path, LOCKSTEP_CACHE_DIR=str(other)))
    assert answer(again) == 42 and again.compile_seconds > 0 and "is damaged and is compiled anew" in caplog.text


@needs_compiler
def test_a_failed_build_is_a_warning_and_the_kernel_is_lacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "KERNELS", tmp_path)
    monkeypatch.setattr(native, "_loaded", {})
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "broken.cpp").write_text("this is no C++")
    monkeypatch.setenv("LOCKSTEP_CACHE_DIR", str(tmp_path / "cache"))
    assert native.load("layers/broken.cpp") is None and native.lacking() == ["layers/broken.cpp"]
    [record] = [record for record in caplog.records if "broken.cpp" in record.message]
    assert record.levelno == logging.WARNING


def test_the_reason_is_told_when_there_is_no_compiler(source: Path, tmp_path: Path) -> None:
    with pytest.raises(native.NativeUnavailable, match="no C\\+\\+ compiler: g\\+\\+ and clang\\+\\+ not found"):
        native.build(source, {"PATH": str(tmp_path), "LOCKSTEP_CACHE_DIR": str(tmp_path)})
    with pytest.raises(native.BuildFailed, match="nonesuch not found"):  # a warning: it was asked for
        native.build(source, environment(tmp_path, CXX="nonesuch"))
    with pytest.raises(native.BuildFailed, match="which is no command"):
        native.build(source, environment(tmp_path, CXX='g++ "'))


@needs_compiler
def test_a_compiler_may_have_arguments(source: Path, tmp_path: Path) -> None:
    source.write_text(SOURCE.replace("42", "ANSWER"))
    [path, *_] = native.find_compiler(os.environ)
    assert answer(native.build(source, environment(tmp_path, CXX=f"env {path} -DANSWER=42"))) == 42


@needs_compiler
def test_other_arguments_of_a_compiler_make_another_library(source: Path, tmp_path: Path) -> None:
    source.write_text(SOURCE.replace("42", "ANSWER"))
    [path, *_] = native.find_compiler(os.environ)
    for number in (42, 43, 42):
        assert answer(native.build(source, environment(tmp_path, CXX=f"{path} -DANSWER={number}"))) == number


@needs_compiler
def test_what_killed_compilations_left_is_removed_and_not_what_another_one_writes(source: Path, tmp_path: Path) -> None:
    library = native.build(source, environment(tmp_path)).path
    library.unlink()
    left, written, other = (library.parent / f"{stem}-x" for stem in (library.stem, f"{library.stem}-now", "other"))
    for folder in (left, written, other):
        folder.mkdir()
        (folder / "kernel.o").write_text("half")
    for folder in (left, other):
        os.utime(folder, (0, 0))
    assert native.build(source, environment(tmp_path)).path == library
    assert sorted(library.parent.iterdir()) == sorted([library, written, other])


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes a user without an entry")
def test_a_user_without_a_home_is_told_what_to_set(source: Path) -> None:
    code = f"""if True:
        import os
        from pathlib import Path
        from lockstep.kernels.machine import kept_checks, native
        os.setuid(54321)
        del os.environ["HOME"]
        try:
            native.build(Path({str(source)!r}), {{"PATH": os.environ["PATH"]}})
        except native.BuildFailed as error:
            assert "set LOCKSTEP_CACHE_DIR" in str(error), error
            kept_checks.keep("check", [1], {{"a": 1}})
            assert kept_checks.kept("check", [1], ["a"]) is None
            print("told")
    """
    environ = {**os.environ, "LOCKSTEP_KEPT_CHECKS": "1", "HOME": "/"}
    environ = {name: value for name, value in environ.items() if name not in ("LOCKSTEP_CACHE_DIR", "XDG_CACHE_HOME")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "told\n"


@pytest.mark.parametrize("name", ["LOCKSTEP_NATIVE", "LOCKSTEP_TRITON", "LOCKSTEP_KEPT_CHECKS", "LOCKSTEP_HUGE_PAGES"])
def test_a_switch_is_0_or_1(name: str) -> None:
    assert [is_on(name, {name: value}) for value in ("", "0", "1")] == [True, False, True] and is_on(name, {})
    for value in ("false", "x", "00"):
        with pytest.raises(ValueError, match=f"{name} is '{value}': it is 0 or 1"):
            is_on(name, {name: value})


@needs_compiler
def test_a_cache_that_cannot_be_written_is_the_reason(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(native.NativeUnavailable, match="cannot be made"):
        native.build(source, environment(tmp_path, LOCKSTEP_CACHE_DIR=str(tmp_path / "file" / "cache")))


@needs_compiler
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_cache_that_others_can_write_is_refused_with_the_remedy(source: Path, tmp_path: Path, mode: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(UnsafeCache, match=rf"{tmp_path}/cache has mode {mode:04o}.*chmod go-w.*LOCKSTEP_CACHE_DIR"):
        native.build(source, environment(tmp_path))
    assert list((tmp_path / "cache").iterdir()) == []


@needs_compiler
def test_a_library_that_others_can_write_is_not_loaded(source: Path, tmp_path: Path) -> None:
    library = native.build(source, environment(tmp_path)).path
    library.chmod(0o757)
    with pytest.raises(UnsafeCache, match=rf"{library} has mode 0757"):
        native.build(source, environment(tmp_path))


@needs_compiler
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_cache_of_another_user_is_refused(source: Path, tmp_path: Path) -> None:
    library = native.build(source, environment(tmp_path)).path
    for path in (library, library.parent):
        os.chown(path, 12345, -1)
        with pytest.raises(UnsafeCache, match=rf"{path} belongs to the user 12345"):
            native.build(source, environment(tmp_path))
        os.chown(path, 0, -1)


@needs_compiler
def test_a_new_cache_is_for_its_user_alone_whatever_the_umask_allows(source: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        library = native.build(source, environment(tmp_path)).path
    finally:
        os.umask(before)
    assert library.parent.stat().st_mode & 0o777 == 0o700 and library.stat().st_mode & 0o022 == 0


def test_the_switch_turns_native_code_off_and_attention_falls_to_pytorch(tmp_path: Path) -> None:
    program = (
        "import logging, torch; logging.basicConfig(level=logging.INFO)\n"
        "from lockstep.kernels.machine import native\n"
        "from lockstep.kernels.attention.packed import varlen_attention\n"
        "from lockstep.kernels.attention.paged import attention_path\n"
        "name = 'attention/paged_attention.cpp'\n"
        "assert native.load(name) is None and native.load(name) is None\n"
        "why = native.why_unavailable(name)\n"
        "print(why, attention_path(torch.device('cpu'), torch.float32))\n"
        "x = torch.ones(3, 1, 8)\n"
        "assert varlen_attention(x, x, x, torch.tensor([0, 3], dtype=torch.int32), scale=1.0).equal(x)\n"
    )
    environ = {**os.environ, "LOCKSTEP_NATIVE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "switched off by LOCKSTEP_NATIVE=0 torch"
    assert done.stderr.count("native attention/paged_attention.cpp is not available") == 1


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention/paged_attention.cpp", "linear/linear.cpp"])
def test_our_kernels_compile_without_a_warning_and_share_torchs_openmp(name: str, tmp_path: Path) -> None:
    library = native.load(name)
    assert library is not None and native.why_unavailable(name) is None
    source = native.KERNELS / name
    command = [
        *native.find_compiler(os.environ),
        *native.FLAGS,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-psabi",
        "-fsyntax-only",
        native.INCLUDE_FLAG,
    ]
    subprocess.run([*command, str(source)], check=True)
    maps = Path("/proc/self/maps")
    if maps.exists() and list((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
        assert len(loaded) == 1, f"two OpenMP runtimes: {loaded}"


def test_a_level_takes_the_instructions_above_it_away_and_an_unknown_one_is_refused() -> None:
    assert native.compile_flags({}) == native.compile_flags({"LOCKSTEP_MAX_ISA": "amx"}) == list(native.FLAGS)
    assert "-march=native" not in native.compile_flags({"LOCKSTEP_MAX_ISA": "plain"})
    if platform.machine() == "x86_64":
        avx2 = native.compile_flags({"LOCKSTEP_MAX_ISA": "avx2"})
        assert {"-mno-avx512f", "-mno-avx512bf16", "-mno-amx-bf16"} < set(avx2)
        assert "-mno-avx512f" not in native.compile_flags({"LOCKSTEP_MAX_ISA": "avx512"})
    with pytest.raises(ValueError, match="LOCKSTEP_MAX_ISA is 'avx10', not one of plain, avx2"):
        native.compile_flags({"LOCKSTEP_MAX_ISA": "avx10"})


@needs_compiler
def test_flags_of_the_callers_own_prevail_and_have_a_library_of_their_own(source: Path, tmp_path: Path) -> None:
    source.write_text('extern "C" long answer(long x) { return x + MORE; }\n')
    libraries = [native.build(source, environment(tmp_path), [f"-DMORE={more}"]) for more in (5, 6)]
    assert [answer(library) for library in libraries] == [5, 6] and libraries[0].path != libraries[1].path


@needs_compiler
def test_the_kernels_compile_for_processors_without_wide_vectors() -> None:
    compiler = native.find_compiler(os.environ)
    baseline = [flag for flag in native.FLAGS if flag != "-march=native"]
    for name in ("attention/paged_attention.cpp", "linear/linear.cpp"):
        subprocess.run(
            [*compiler, *baseline, native.INCLUDE_FLAG, "-fsyntax-only", str(native.KERNELS / name)], check=True
        )


def test_loading_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=native.__name__):
        native.load("linear/linear.cpp")
        before = len(caplog.records)
        native.load("linear/linear.cpp")
    assert len(caplog.records) == before <= 1


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64" or shutil.which("objdump") is None, reason="needs objdump, for x86")
@pytest.mark.parametrize("name", ["attention/paged_attention.cpp", "linear/linear.cpp"])
def test_prefetches_are_compiled(name: str) -> None:
    """GCC takes a function that only prefetches for one without effects, and drops its calls."""
    library = native.load(name)
    assert library is not None
    listing = subprocess.run(["objdump", "-d", library.path], check=True, capture_output=True, text=True).stdout
    assert "prefetch" in listing

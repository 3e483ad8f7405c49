"""Who gets which code, and what is said where it cannot be had."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.interfaces.errors import ConfigError
from pegboard.plugins.cpu_native import library
from pegboard.plugins.cpu_native.__main__ import main
from pegboard.plugins.cpu_native.library import FLAGS, NativeError, available, choose, cpu_flags
from pegboard.toolkit.system.progress import LogLines, shown_by

SAPPHIRE = (
    "processor : 0\nflags\t\t: fpu avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_tile amx_bf16 x\n"
)
COOPER = SAPPHIRE.replace("amx_tile amx_bf16", "")
HASWELL = "flags : fpu avx2 fma f16c\n"

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SAPPHIRE, ("amx", "avx512", "avx2")),
        (COOPER, ("avx512", "avx2")),
        (HASWELL, ("avx2",)),
        ("flags : fpu sse2\n", ()),
        ("", ()),
    ],
)
def test_instruction_sets_by_flags(text: str, expected: tuple[str, ...]) -> None:
    assert available(cpu_flags(text)) == expected


def test_a_set_that_the_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cpu_flags", lambda: cpu_flags(HASWELL))
    assert choose("auto") == "avx2"
    for name in ("amx", "amx_emulated"):
        with pytest.raises(NativeError, match=f"does not have {name}; it has avx2"):
            choose(name)
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset())
    with pytest.raises(NativeError, match="none of AMX, AVX-512 bf16 and AVX2"):
        choose("auto")


def test_emulation_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "cpu_flags", lambda: cpu_flags(COOPER))
    assert choose("auto") == "avx512"
    assert choose("amx_emulated") == "amx_emulated"


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeError, match=r"\(c\+\+, g\+\+, clang\+\+\).*install g\+\+, or set CXX"):
        library.compiler()
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(NativeError, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        library.compiler()


def test_cxx_may_have_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -m ziglang 'c++'")
    assert library.compiler() == (sys.executable, "-m", "ziglang", "c++")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, and nothing remembered of other tests' libraries."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PEGBOARD_CACHE", str(folder))
    kept = (library._built, library.load)
    for one in kept:
        one.cache_clear()
    yield folder
    for one in kept:
        one.cache_clear()


def fake_compiler(folder: Path, *lines: str) -> str:
    """A program that says its version, and otherwise does what `lines` of shell do."""
    file = folder / "fake-c++"
    file.write_text("\n".join(["#!/bin/sh", '[ "$1" = --version ] && exec echo fake 1.0', *lines]))
    file.chmod(0o755)
    return str(file)


FAILS_FOR_AMX = (
    'case "$*" in *amx*) echo "cc1plus: note: hm"; echo "x.cpp:7:1: error: no amx here" >&2; exit 1;; esac',
    'exec c++ "$@"',
)


def test_a_failed_compile_shows_the_compilers_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    broken = tmp_path / "engine.cpp"
    broken.write_text("int main( { this is no C++")
    monkeypatch.setattr(library, "SOURCE", broken)
    with pytest.raises(NativeError, match=r"could not compile engine\.cpp for avx2: .*error.*set CXX") as raised:
        library.build("avx2")
    assert "\n" not in str(raised.value), "one line, for the log line of the choice"
    assert "this is no C++" in raised.value.said, "and all of it apart"
    assert not list(cache.rglob("*.so"))


@pytest.mark.parametrize("lines", [("exit 3",), ("kill -9 $$",)])
def test_a_compiler_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, lines: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, *lines))
    with pytest.raises(NativeError, match=r"for avx2: exit status -?\d+; GCC 12"):
        library.build("avx2")


def test_a_compiler_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "exec sleep 60"))
    monkeypatch.setattr(library, "COMPILE_SECONDS", 0.2)
    shown: list[str] = []

    def display(what: str) -> LogLines:
        shown.append(what)
        return LogLines(what)

    with shown_by(display), pytest.raises(NativeError, match=r"for avx2: .*timed out.*GCC 12"):
        library.build("avx2")
    assert shown == ["compiling the native runner"]


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(NativeError, match=r"cannot be written.*set PEGBOARD_CACHE"):
        library.build("avx2")


def test_a_disk_that_is_full(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """It is told before the compiler, whose linker would fail without a reason that a user can act on."""
    monkeypatch.setattr(library, "COMPILE_BYTES", 2**62)
    with pytest.raises(NativeError, match=r"cannot be written: .*MiB are free; set PEGBOARD_CACHE"):
        library.build("avx2")


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    damaged = tmp_path / "engine.so"
    damaged.write_bytes(b"not a library")
    monkeypatch.setattr(library, "build", lambda instructions: damaged)
    with pytest.raises(NativeError, match=r"engine\.so cannot be loaded.*delete it, or set PEGBOARD_CACHE"):
        library.load.__wrapped__("avx2")


def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sources that compile at once, and have all functions."""
    text = "".join(file.read_text("utf-8") for file in library.SOURCE.parent.glob("*.*"))
    names = sorted(set(re.findall(r"\bpb_\w+(?=\()", text)))
    assert "pb_prepare" in names
    source = "\n".join(f"int {name}() {{ return 0; }}" for name in names)
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "engine.cpp").write_text(f'extern "C" {{\n{source}\n}}\n')
    monkeypatch.setattr(library, "SOURCE", folder / "engine.cpp")


@needs_compiler
def test_the_next_set_takes_over_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small(monkeypatch, tmp_path)
    monkeypatch.setattr(library, "cpu_flags", lambda: cpu_flags(SAPPHIRE))
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, *FAILS_FOR_AMX))
    assert library.first_that_loads("auto")[0] == "avx512"
    (warning,) = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
    assert "for amx: x.cpp:7:1: error: no amx here" in warning
    assert "avx512 is used instead" in warning
    with pytest.raises(NativeError, match="no amx here"):
        library.first_that_loads("amx")


def test_one_reason_where_nothing_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "cpu_flags", lambda: cpu_flags(SAPPHIRE))
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "echo one >&2; echo two error >&2; exit 1"))
    with pytest.raises(NativeError, match="for amx: two error; GCC 12") as raised:
        library.first_that_loads("auto")
    assert "avx" not in str(raised.value)
    (warning,) = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
    assert warning.endswith("\none\ntwo error")


def test_a_missing_compiler_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another runner takes over, several times as slow, and nothing else would say why."""
    monkeypatch.setattr(library, "cpu_flags", lambda: cpu_flags(SAPPHIRE))
    monkeypatch.setenv("CXX", "no-such-compiler")
    for quiet in (True, False):
        with pytest.raises(NativeError):
            library.first_that_loads("auto", quiet=quiet)
    (warning,) = [one.message for one in caplog.records if one.levelno >= logging.WARNING]
    assert "cannot be used: no C++ compiler (no-such-compiler) is installed" in warning


def test_a_failed_compile_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A sampler and a runner ask for the same library, one after the other."""
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, f"echo again >> {tmp_path / 'calls'}; echo error >&2; exit 1"))
    for _ in range(2):
        with pytest.raises(NativeError, match="for avx2: error"):
            library.build("avx2")
    assert (tmp_path / "calls").read_text() == "again\n"


@needs_compiler
def test_an_image_may_run_without_the_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small(monkeypatch, tmp_path)
    with caplog.at_level(logging.INFO):
        made = library.build("avx2")
    assert [one for one in caplog.messages if "compiling the native runner for avx2" in one and "once" in one]
    library._built.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library.build("avx2") == made
    library._built.cache_clear()
    library.SOURCE.write_text("another version of it")
    with pytest.raises(NativeError, match="no-such-compiler"):
        library.build("avx2")


class TestAhead:
    """``python -m pegboard.plugins.cpu_native``, as `make setup` runs it."""

    @needs_compiler
    def test_compiles(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, capsys: Any) -> None:
        small(monkeypatch, tmp_path)
        monkeypatch.setattr(library, "cpu_flags", lambda: cpu_flags(HASWELL))
        assert main() == 0
        assert str(next(cache.rglob("engine-avx2-*.so"))) in capsys.readouterr().out

    def test_says_why_not(self, monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: Any) -> None:
        monkeypatch.setattr(library, "cpu_flags", lambda: cpu_flags(HASWELL))
        monkeypatch.setenv("CXX", "no-such-compiler")
        assert main() == 1
        assert "no native runner: no C++ compiler (no-such-compiler) is installed" in capsys.readouterr().err


@needs_compiler
def test_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    small(monkeypatch, tmp_path)
    first = library.build("avx2")
    before = first.stat().st_mtime_ns
    library._built.cache_clear()
    assert library.build("avx2") == first
    assert first.stat().st_mtime_ns == before
    (library.SOURCE.parent / "part.h").write_text("// a header is a part of it")
    library._built.cache_clear()
    assert library.build("avx2") != first


@needs_compiler
def test_one_of_several_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    """Processes that start together wait for the first; threads stand for them, for a lock is per opened file."""
    small(monkeypatch, tmp_path)
    compiled: list[str] = []
    make = library._make

    def slow(target: Path, command: list[str], instructions: str) -> None:
        compiled.append(instructions)
        time.sleep(0.2)
        make(target, command, instructions)

    monkeypatch.setattr(library, "_make", slow)
    arguments = ("avx2", library.compiler(), library.SOURCE, cache)
    with ThreadPoolExecutor(4) as pool:
        made = {one.result() for one in [pool.submit(library._built.__wrapped__, *arguments) for _ in range(4)]}
    assert len(made) == 1
    assert compiled == ["avx2"]


@needs_compiler
def test_without_locks_each_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    small(monkeypatch, tmp_path)

    def lockless(path: Path) -> contextlib.AbstractContextManager[None]:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(library, "locked", lockless)
    assert library.build("avx2").is_file()


def test_every_set_has_flags_and_needs() -> None:
    assert set(FLAGS) == set(library._NEEDS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoints"), "llama")


class TestChoice:
    """`auto` takes it where it fits, and what the config names is respected."""

    def runner(self, checkpoint: Path, **config: object) -> str:
        from pegboard.core.engine.engine import Engine

        base = {
            "model": {"path": str(checkpoint), "dtype": "bfloat16", "device": "cpu"},
            "memory": {"max_total_tokens": 256},
            "log_level": "error",
        }
        with Engine.from_config({**base, **config}) as engine:
            return str(engine.info.providers["runner"][0])

    @pytest.mark.skipif(not available(cpu_flags()), reason="this CPU has none of the instruction sets")
    def test_auto(self, checkpoint: Path) -> None:
        assert self.runner(checkpoint) == "cpu_native"

    def test_float32_is_float32(self, checkpoint: Path) -> None:
        model = {"path": str(checkpoint), "dtype": "float32", "device": "cpu"}
        assert self.runner(checkpoint, model=model) == "layered"

    def test_an_explicit_attention_is_used(self, checkpoint: Path) -> None:
        assert self.runner(checkpoint, attention={"use": "torch"}) == "layered"

    def test_both_named_exclude_each_other(self, checkpoint: Path) -> None:
        with pytest.raises(ConfigError, match=r"attention of its own, and attention\.use names another"):
            self.runner(checkpoint, attention={"use": "torch"}, runner={"use": "cpu_native"})

    def test_no_compiler_falls_back(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        with caplog.at_level(logging.INFO):
            assert self.runner(checkpoint, log_level="info") == "layered"
        told = [one for one in caplog.records if "no-such-compiler" in one.message]
        assert [one.levelno for one in told] == [logging.WARNING, logging.INFO]
        assert told[1].message.startswith("runner: layered")
        assert all("install g++" in one.message for one in told)
        with pytest.raises(ConfigError, match=r"runner\.use: cpu_native .* no C\+\+ compiler .* install g\+\+"):
            self.runner(checkpoint, runner={"use": "cpu_native"})

    def test_a_failing_compiler_falls_back(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, caplog: Any
    ) -> None:
        monkeypatch.setenv("CXX", fake_compiler(tmp_path, "echo engine.cpp:1: error: hm >&2; exit 1"))
        with caplog.at_level(logging.INFO):
            assert self.runner(checkpoint, log_level="info") == "layered"
        assert len([one for one in caplog.messages if one.startswith("runner: layered") and "error: hm" in one]) == 1
        with pytest.raises(ConfigError, match=r"runner\.use: .* could not compile .* error: hm; GCC 12 .* set CXX"):
            self.runner(checkpoint, runner={"use": "cpu_native"})

    @needs_compiler
    @pytest.mark.skipif("avx2" not in available(cpu_flags()), reason="this CPU has no AVX2")
    def test_a_set_that_is_named_and_does_not_compile(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from pegboard.plugins.cpu_native import runner

        kept = library.first_that_loads

        def fails(wanted: str, *, quiet: bool = False) -> Any:
            if wanted == "avx2":
                raise NativeError("it does not compile")
            return kept(wanted, quiet=quiet)

        monkeypatch.setattr(runner, "first_that_loads", fails)
        with pytest.raises(ConfigError, match=r"runner\.instructions: it does not compile"):
            self.runner(checkpoint, runner={"use": "cpu_native", "instructions": "avx2"})


def test_an_unknown_instruction_set_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sse9"]) == 1
    assert "'sse9' is not one of amx, avx512, avx2" in capsys.readouterr().err

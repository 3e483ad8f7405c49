"""Who gets which code, and what is said where it cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.testing.checkpoints import tiny_checkpoint
from pegboard.plugins.cpu_native import library
from pegboard.plugins.cpu_native.library import FLAGS, NativeError, available, choose, cpu_flags

SAPPHIRE = (
    "processor : 0\nflags\t\t: fpu avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_tile amx_bf16 x\n"
)
COOPER = SAPPHIRE.replace("amx_tile amx_bf16", "")
HASWELL = "flags : fpu avx2 fma f16c\n"


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
    with pytest.raises(NativeError, match="does not have amx; it has avx2"):
        choose("amx")
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset())
    with pytest.raises(NativeError, match="none of AMX, AVX-512 bf16 and AVX2"):
        choose("auto")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeError, match=r"install g\+\+ or set CXX"):
        library.compiler()


def test_a_failed_compile_shows_the_compilers_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "engine.cpp"
    broken.write_text("int main( { this is no C++")
    monkeypatch.setattr(library, "SOURCE", broken)
    monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path / "cache"))
    library.build.cache_clear()
    with pytest.raises(NativeError, match=r"(?s)could not compile engine\.cpp for avx2.*set CXX.*error"):
        library.build("avx2")
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = tmp_path / "engine.cpp"
    small.write_text('extern "C" int pb_prepare() { return 0; }')
    monkeypatch.setattr(library, "SOURCE", small)
    monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path / "cache"))
    library.build.cache_clear()
    first = library.build("avx2")
    before = first.stat().st_mtime_ns
    library.build.cache_clear()
    assert library.build("avx2") == first
    assert first.stat().st_mtime_ns == before
    small.write_text('extern "C" int pb_prepare() { return 1; }')
    library.build.cache_clear()
    assert library.build("avx2") != first
    library.build.cache_clear()


def test_every_set_has_flags_and_needs() -> None:
    assert set(FLAGS) == set(library._NEEDS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoints"), "llama")


class TestChoice:
    """`auto` takes it where it fits, and what the config names is respected."""

    def runner(self, checkpoint: Path, **config: object) -> str:
        from pegboard.core.engine import Engine

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

    def test_no_compiler_falls_back(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def fails(wanted: str) -> None:
            raise NativeError("no C++ compiler is installed")

        monkeypatch.setattr("pegboard.plugins.cpu_native.runner.first_that_loads", fails)
        assert self.runner(checkpoint) == "layered"
        with pytest.raises(ConfigError, match=r"no C\+\+ compiler is installed"):
            self.runner(checkpoint, runner={"use": "cpu_native"})

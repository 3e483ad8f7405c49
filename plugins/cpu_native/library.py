"""The native library: which instructions this CPU has, compiling for them, and the functions with their types.

The code is compiled once per machine, at its first use, with the system's C++ compiler (some seconds), and kept in
Pegboard's cache directory under a hash of source, flags and compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from pegboard.toolkit.system.cache_dir import default_cache_dir
from pegboard.toolkit.system.locks import locked
from pegboard.toolkit.system.progress import progress

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "csrc" / "engine.cpp"
COMPILE_SECONDS = 300
COMPILE_BYTES = 16 * 2**20
"""Free space that compiling asks for. The library has about 1 MB, what the compiler writes meanwhile some more."""
_SHOWN = 2000
"""Characters of a compiler's complaint."""

_COMMON = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread")
_AVX512 = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16")
FLAGS = {
    "amx": ("-DPB_AMX", *_AVX512, "-mamx-tile", "-mamx-bf16"),
    "avx512": ("-DPB_AVX512", *_AVX512),
    # Sums in any order, but not -ffast-math: a library linked with it makes the whole process lose small numbers.
    "avx2": (
        *("-mavx2", "-mfma", "-mf16c", "-fno-math-errno", "-fno-trapping-math"),
        *("-fno-signed-zeros", "-fassociative-math"),
    ),
    "amx_emulated": ("-DPB_AMX", "-DPB_EMULATED_TILES", *_AVX512),
}
_NEEDS = {
    "amx": {"amx_tile", "amx_bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"},
    "avx2": {"avx2", "fma", "f16c"},
}
_NEEDS["amx_emulated"] = _NEEDS["avx512"]
INSTRUCTION_SETS: tuple[str, ...] = ("amx", "avx512", "avx2")
"""Best first. The one that is emulated has to be asked for by name: it is for tests of what is written for AMX."""


class NativeError(Exception):
    """The library cannot be had; the message says why, and what to do. `said` is what a compiler has written, a few
    lines that begin with a line break, or nothing.
    """

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


def cpu_flags(text: str | None = None) -> frozenset[str]:
    """Return what this CPU can do, under the kernel's names."""
    if text is None:
        try:
            text = Path("/proc/cpuinfo").read_text("utf-8")
        except OSError:
            return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def available(flags: frozenset[str]) -> tuple[str, ...]:
    """Return the instruction sets that a CPU with these flags has, best first, without those that are emulated."""
    return tuple(name for name in INSTRUCTION_SETS if _NEEDS[name] <= flags)


def choose(wanted: str) -> str:
    """Return the instruction set for `wanted` ("auto" or a name). Raises NativeError where this CPU lacks it."""
    flags = cpu_flags()
    found = available(flags)
    if wanted == "auto":
        if not found:
            raise NativeError("this CPU has none of AMX, AVX-512 bf16 and AVX2")
        return found[0]
    if not _NEEDS[wanted] <= flags:
        raise NativeError(f"this CPU does not have {wanted}; it has {', '.join(found) or 'none of them'}")
    return wanted


def compiler() -> tuple[str, ...]:
    """Return the C++ compiler's command: $CXX, or the first of c++, g++, clang++. Raises NativeError where there is
    none.
    """
    try:
        wanted = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise NativeError(f"CXX={os.environ['CXX']!r} is not a command: {error}") from error
    commands = [wanted] if wanted else [["c++"], ["g++"], ["clang++"]]
    for name, *arguments in commands:
        if path := shutil.which(name):
            return (path, *arguments)
    names = ", ".join(name for name, *_ in commands)
    raise NativeError(
        f"no C++ compiler ({names}) is installed, which it needs once; install g++, or set CXX to a compiler"
    )


def build(instructions: str) -> Path:
    """Return the library for an instruction set, compiled unless the cache has it. Raises NativeError; what has failed
    once in this process is not tried again.

    Where there is no compiler, one that another compiler has made of the same source will do: an image may be built
    with a compiler and run without.
    """
    try:
        cxx: tuple[str, ...] | NativeError = compiler()
    except NativeError as error:
        cxx = error
    made = _built(instructions, cxx if isinstance(cxx, tuple) else None, SOURCE, default_cache_dir() / "cpu_native")
    if made is None:
        assert isinstance(cxx, NativeError)
        raise cxx
    if isinstance(made, NativeError):
        raise NativeError(str(made), made.said)
    return made


@functools.cache
def _built(
    instructions: str, cxx: tuple[str, ...] | None, main_source: Path, directory: Path
) -> Path | NativeError | None:
    """Return the library, or why there is none: None for want of a compiler."""
    flags = (*_COMMON, *FLAGS[instructions])
    # Headers count: one of them changed makes another library.
    source = b"".join(file.read_bytes() for file in sorted(main_source.parent.glob("*.[ch]*")) if file.is_file())
    name = f"engine-{instructions}-{_digest(source, ' '.join(flags).encode())}"
    if cxx is None:
        return next(iter(sorted(directory.glob(f"{name}-*.so"))), None)
    target = directory / f"{name}-{_digest(*(word.encode() for word in cxx), _version(cxx))}.so"
    try:
        if target.is_file():
            return target
        directory.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(directory).free < COMPILE_BYTES:
            raise OSError(errno.ENOSPC, f"less than {COMPILE_BYTES >> 20} MiB are free")
        with contextlib.ExitStack() as stack:
            # Compiling takes a core for many seconds, so processes that start together leave it to one of them. Where
            # the file system has no locks, each compiles.
            with contextlib.suppress(OSError):
                stack.enter_context(locked(directory / f".{target.stem}.lock"))
            if not target.is_file():
                logger.info(
                    "compiling the native runner for %s with %s (once, some seconds)", instructions, " ".join(cxx)
                )
                with progress("compiling the native runner"):
                    _make(target, [*cxx, *flags, str(main_source)], instructions)
    except OSError as error:
        return NativeError(f"{directory} cannot be written: {error}; set PEGBOARD_CACHE to a folder that can")
    except NativeError as error:
        return error
    return target


def _make(target: Path, command: list[str], instructions: str) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        # Under its own name only when it is whole: others look for that name without a lock.
        made = Path(scratch) / target.name
        _compile([*command, "-o", str(made)], instructions)
        made.replace(target)


def _compile(command: list[str], instructions: str) -> None:
    what = f"{command[0]} could not compile {SOURCE.name} for {instructions}"
    remedy = "GCC 12 or Clang 15 and later can: install one, or set CXX to it"
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{what}: {error}; {remedy}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).decode("utf-8", "replace")
        said = said or f"exit status {done.returncode}"
        lines = said.splitlines()
        complaint = next((line for line in lines if "error" in line), lines[0])
        raise NativeError(f"{what}: {complaint.strip()}; {remedy}", f"\n{said[:_SHOWN]}")


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _version(cxx: tuple[str, ...]) -> bytes:
    """Return what the compiler says of itself; nothing where it says nothing, and then compiling tells what is
    wrong.
    """
    try:
        return subprocess.run([*cxx, "--version"], capture_output=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return b""


FORMATS = ("bf16", "bf12", "bytes", "nibbles", "int4")
"""Format of the source."""

SITES = ("qkv", "o", "gate_up", "down", "head")
"""Site of the source."""

STAGES = ("embed", "qkv", "rope", "attention", "out", "norm", "gate_up", "down", "head", "sample")
"""Stage of the source."""


class Shape(ctypes.Structure):
    """PbShape of the source."""

    _fields_ = [
        *[
            (name, ctypes.c_int32)
            for name in (
                "vocab", "hidden", "inter", "layers", "heads", "kv_heads", "head_dim", "act", "qk_norm", "threads",
                "wanted", "experts", "per_token", "expert_inter", "normalised", "ranks", "rank", "first_id",
            )
        ],
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]  # fmt: skip


class Weights(ctypes.Structure):
    """PbWeights of the source."""

    _fields_ = [
        ("numbers", ctypes.c_void_p), ("words", ctypes.c_void_p), ("group", ctypes.c_int32), ("format", ctypes.c_int32),
    ]  # fmt: skip


class Vectors(ctypes.Structure):
    """PbVectors of the source."""

    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in (
                "norm1", "norm2", "q_norm", "k_norm", "q_bias", "k_bias",
                "v_bias", "o_bias", "gate_bias", "up_bias", "down_bias", "router",
            )
        ],
        ("window", ctypes.c_int32),
    ]  # fmt: skip


class LowRankSite(ctypes.Structure):
    """PbLowRank of the source."""

    _fields_ = [*[(name, ctypes.c_void_p) for name in ("a", "b", "halves")], ("ranks", ctypes.c_int32)]


class Additions(ctypes.Structure):
    """PbAdditions of the source."""

    _fields_ = [
        *[(name, ctypes.c_int32) for name in ("count", "most_ranks")],
        *[(name, ctypes.c_void_p) for name in ("adapters", "which", "order", "begin", "place")],
    ]


class Batch(ctypes.Structure):
    """PbBatch of the source."""

    _fields_ = [
        *[
            (name, ctypes.c_int32)
            for name in ("tokens", "batch", "sampled", "hidden_count", "embed_count", "deep_levels", "tap_count")
        ],
        *[
            (name, ctypes.c_void_p)
            for name in (
                "ids", "rows", "seq_lens", "starts", "out_loc", "logits_indices", "hidden_rows", "embed_rows", "tails",
                "bits", "embeds", "deep", "cos", "sin", "table", "tap_places",
            )
        ],
        ("table_stride", ctypes.c_int64),
        *[
            (name, ctypes.c_void_p)
            for name in ("keys", "values", "logits", "drawn", "sampling", "hidden", "tapped", "additions")
        ],
    ]  # fmt: skip


COLUMNS = ("temperatures", "top_ps", "min_ps", "top_ks", "seeds", "steps")
"""The tensors of a SamplingBatch that the library reads."""


class Sampling(ctypes.Structure):
    """PbSampling of the source."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in (*COLUMNS, "mask", "mask_rows")],
        ("mask_words", ctypes.c_int64),
        ("masks", ctypes.c_int32),
    ]  # fmt: skip


@functools.cache
def load(instructions: str) -> ctypes.CDLL:
    """Return the library, ready for use in this process. Raises NativeError."""
    file = build(instructions)
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise NativeError(
            f"{file} cannot be loaded: {error}; delete it, or set PEGBOARD_CACHE to a folder on a file system that "
            "lets programs run"
        ) from error
    _declare(library)
    if code := library.pb_prepare():
        raise NativeError(f"the kernel does not let this process use {instructions}: {os.strerror(code)}")
    return library


LOST = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_double)
"""What the library asks while it waits for other ranks: 0 as long as it is of use."""
RANK_LOST = 2
"""What `pb_forward` and `pb_sum` return where another rank is lost."""


def _declare(library: ctypes.CDLL) -> None:
    """Give the functions their types."""
    pointer, number = ctypes.c_void_p, ctypes.c_int
    for name, arguments, result in (
        ("pb_prepare", [], number),
        ("pb_multiply", [number, number, pointer, number, number, pointer, number, pointer], number),
        ("pb_create", [pointer], pointer),
        ("pb_destroy", [pointer], None),
        ("pb_set_matrix", [pointer, number, number, number, pointer], number),
        ("pb_set_vectors", [pointer, number, pointer], number),
        ("pb_set_ends", [pointer, pointer, pointer], number),
        ("pb_count_weights", [pointer, pointer], None),
        ("pb_ranks_bytes", [pointer], ctypes.c_int64),
        ("pb_join", [pointer, pointer, LOST], None),
        ("pb_sum", [pointer, pointer, number], number),
        ("pb_forward", [pointer, pointer], number),
        ("pb_attend", [pointer, pointer, number, pointer, pointer], number),
        ("pb_add", [pointer, number, pointer, number, number, number, pointer], number),
        ("pb_take_seconds", [pointer, pointer], None),
        ("pb_project", [pointer, pointer, number, pointer], number),
        ("pb_sampler_create", [number], pointer),
        ("pb_sampler_destroy", [pointer], None),
        ("pb_sample", [pointer, pointer, ctypes.c_int64, number, number, pointer, pointer], number),
        (
            "pb_log_sums",
            [pointer, pointer, ctypes.c_int64, number, number, pointer, number, pointer, pointer, pointer],
            number,
        ),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result


def first_that_loads(wanted: str, *, quiet: bool = False) -> tuple[str, ctypes.CDLL]:
    """Return the best instruction set that works here, with its library. Raises NativeError with what was wrong with
    the best.

    Logs one warning where another set has to do, or where something is missing that could be there (a compiler), with
    a compiler's words where there are any; unless `quiet`.
    """
    names = available(cpu_flags()) if wanted == "auto" else (choose(wanted),)
    first: NativeError | None = None
    for name in names or (choose(wanted),):
        try:
            library = load(name)
        except NativeError as error:
            first = first or error
            continue
        if first is not None and not quiet:
            logger.warning("%s; %s is used instead, which is slower%s", first, name, first.said)
        return name, library
    assert first is not None
    if not quiet:
        logger.warning("the native code, the fastest way to run on a CPU, cannot be used: %s%s", first, first.said)
    raise first

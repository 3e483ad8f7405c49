"""Broken kernels: each draws something else than the sampler `torch` somewhere in a few hundred random rows."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from pegboard.plugins.sampler_triton import options
from tests.plugins.sampler_triton.cases import is_rounding, random_cases, triton_sampler

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SOURCE = Path(options.__file__).with_name("kernels.py")
CASES = random_cases(500, 40, seed=4)


@dataclass(frozen=True)
class Mutant:
    """`text` stands `times` times in the kernel's source, and `instead` in the broken one."""

    name: str
    text: str
    instead: str
    times: int = 1


TIES = "(values > value[:, None]) | ((values == value[:, None]) & (ids < token[:, None]))"
MUTANTS = [
    Mutant("none", "", "", 0),
    Mutant("last maximum", "values > top, ids", "values >= top, ids"),
    Mutant(
        "ties at a cut are all kept",
        f"inside = {TIES}\n        count",
        "inside = values > value[:, None]\n        count",
    ),
    Mutant("larger ids stay", "ids < token[:, None]", "ids > token[:, None]", 2),
    Mutant("one token more", "stand < size", "stand <= size"),
    Mutant("top_p of everything", "value = tl.where(limited, threshold, value)", "threshold += 0.0"),
    Mutant("top_p drops what reaches it", "(mass < share)", "(mass + tl.exp((logit - peak) * inverse) < share)"),
    Mutant(
        "ties at top_k's threshold do not count",
        "rest = tl.maximum(size - whole, 0)",
        "rest = tl.minimum(size - whole, 0)",
    ),
    Mutant("a threshold too high", "return _number(low), reached", "return _number(low + 1), reached"),
    Mutant("min_p before temperature", "tl.exp(ahead) >= min_p", "tl.exp(values - peak[:, None]) >= min_p"),
    Mutant("min_p of what is left", "inside & (tl.exp(ahead)", "inside & (tl.exp(ahead) * 0.9"),
    Mutant("noise by row", "halves(seed, step)\n", "halves(seed + row, step)\n"),
    Mutant("no step", "(step + 1) * GAMMA", "GAMMA"),
    Mutant("seeds of 32 bits", "_mixed(seed + GAMMA)", "_mixed((seed & 0xFFFFFFFF) + GAMMA)"),
    Mutant("half a key", "^ high) * WORD_2", "^ low) * WORD_2"),
    Mutant("temperature of noise", "ahead + gumbel", "ahead + 0.9 * gumbel"),
    Mutant("NaN is drawn from", " & (tl.max(wrong, 1) == 0)", ""),
    Mutant("infinity is finite", "tl.abs(values) <= LARGEST", "values > -INFINITY"),
    Mutant("infinity is not clamped", "tl.where(values > LARGEST, LARGEST, values)", "values", 2),
    Mutant("no tile but the first", "range(0, vocab, BLOCK)", "range(0, BLOCK, BLOCK)", 4),
]


def kernels_with(mutant: Mutant, folder: Path) -> ModuleType:
    source = SOURCE.read_text()
    assert source.count(mutant.text) == mutant.times or not mutant.text, f"{mutant.name}: the kernel has changed"
    file = folder / "broken_kernels.py"
    file.write_text(source.replace(mutant.text, mutant.instead) if mutant.text else source)
    spec = importlib.util.spec_from_file_location("broken_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wrong_rows(mutant: Mutant, folder: Path) -> list[int]:
    """Return rows that rounding does not explain."""
    sampler = triton_sampler(CASES.vocab, block=16, rows=512)
    sampler.kernel = kernels_with(mutant, folder).sample_kernel
    pairs = list(zip(CASES.drawn(sampler), CASES.drawn_by_torch(), strict=True))
    differ = [row for row, pair in enumerate(pairs) if pair[0] != pair[1]]
    vocab = CASES.vocab
    return [
        row
        for row in differ
        if not (0 <= min(pairs[row]) <= max(pairs[row]) < vocab)
        or not is_rounding(CASES.logits[row], CASES.rows[row], pairs[row])
    ]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_caught(mutant: Mutant, tmp_path: Path) -> None:
    wrong = wrong_rows(mutant, tmp_path)
    assert bool(wrong) == bool(mutant.text), f"{mutant.name}: rows {wrong[:10]} are wrong"

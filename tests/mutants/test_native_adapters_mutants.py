"""Broken forms of the native runner's adapters, in Python and in C++, and the tests of the suite that notice."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.plugins.adapters.suite import AdapterContract
from pegboard.plugins.cpu_native import library
from pegboard.plugins.cpu_native.api import NativeAdapter, NativeAdditions
from pegboard.plugins.lora_native.backend import NativeAdapters
from tests.plugins.cpu_native.instruction_sets import SETS


class NativeSuite(AdapterContract):
    contract = "adapters"
    dtype = torch.bfloat16
    computed_by = "cpu_native"


class Changed(NativeAdapters):
    """`change` gets what was packed, and the sites."""

    def prepare(self, weights):
        made = super().prepare(weights)
        for number in weights.sites:
            self.change(made, number, made.by_site[number])
        return made

    def change(self, made: NativeAdapter, number, site) -> None:
        raise NotImplementedError


def halves_of(site, rows) -> np.ndarray:
    return np.ctypeslib.as_array(ctypes.cast(site.halves, ctypes.POINTER(ctypes.c_int32)), (rows, 3))


class SwapsGateAndUp(Changed):
    def change(self, made, number, site):
        if number == 2:
            halves = halves_of(site, 6)
            halves[:] = halves[[1, 0, 3, 2, 5, 4]]


class DropsTheLastHalf(Changed):
    def change(self, made, number, site):
        if number == 3:
            halves_of(site, 2)[1] = 0


class TakesTheFirstRanks(Changed):
    def change(self, made, number, site):
        if number == 2:
            halves_of(site, 6)[:, 0] = 0


class LosesAStrip(Changed):
    def change(self, made, number, site):
        site.ranks = min(site.ranks, 16)


class OrdersBackwards(NativeAdapters):
    def begin(self, slots, lens, put):
        made = super().begin(slots, lens, put)
        if made is not None:
            _, order, _, _ = made.arrays
            order[:] = order[::-1].copy()
        return made


class CountsRequests(NativeAdapters):
    """One entry for each request, where tokens are meant."""

    def begin(self, slots, lens, put):
        made = super().begin(slots, lens, put)
        if made is not None and len(slots) < len(made.arrays[0]):
            made.arrays[0][:] = np.resize(made.arrays[0][:: max(1, len(made.arrays[0]) // len(slots))], made.tokens)
        return made


class Compiled(NativeAdapters):
    """Runs `adapters.h` with `old` replaced by `new`."""

    old = new = ""

    def begin(self, slots, lens, put):
        made = super().begin(slots, lens, put)
        if made is not None:
            made.__class__ = _additions(self.old, self.new)
        return made


@functools.cache
def _additions(old: str, new: str) -> type[NativeAdditions]:
    changed = _compiled(old, new)

    class Additions(NativeAdditions):
        def library(self):
            return changed

    return Additions


def _compiled(old: str, new: str) -> ctypes.CDLL:
    source = library.SOURCE.parent / "adapters.h"
    text = source.read_text()
    assert text.count(old) == 1, f"{old!r} must be there once"
    with tempfile.TemporaryDirectory() as directory:
        file, made = Path(directory) / "changed.cpp", Path(directory) / "changed.so"
        file.write_text(text.replace(old, new).replace("#pragma once", ""))
        flags = ("-O1", "-std=c++17", "-shared", "-fPIC", f"-I{source.parent}", *library.FLAGS[SETS[0]])
        subprocess.run([*library.compiler(), *flags, str(file), "-o", str(made)], check=True)
        found = ctypes.CDLL(str(made))
    found.pb_add.argtypes = library.load(SETS[0]).pb_add.argtypes
    return found


def in_source(name: str, old: str, new: str) -> type[Compiled]:
    return type(name, (Compiled,), {"old": old, "new": new})


GAPS, MIX, MANY = "test_rows_with_gaps", "test_any_mix", "test_some_parts_with_ranks_of_their_own"
CAUGHT = {
    SwapsGateAndUp: "test_one_adapter",
    DropsTheLastHalf: "test_one_adapter",
    TakesTheFirstRanks: "test_one_adapter",
    LosesAStrip: MANY,
    OrdersBackwards: MIX,
    CountsRequests: MIX,
}
IN_SOURCE = {
    in_source("OneStripOnly", "+ strip * STRIP, sums", ", sums"): MANY,
    in_source("FirstStripOfA", "size_t(strip) * x.steps", "size_t(0) * x.steps"): MANY,
    in_source(
        "FirstTokens", "all->begin[which] + piece / strips(which) * TOGETHER", "all->begin[which]"
    ): "test_one_adapter",
    in_source("AnotherAdapter", "lanes_of_bf16(b + r * LANES)", "lanes_of_bf16(b)"): "test_one_adapter",
    in_source("GapsAreRows", "last - first == count - 1", "true"): MIX,
    in_source("LosesARank", "ranks = entry[1];", "ranks = entry[1] - 1;"): "test_one_adapter",
    in_source("EightTokensOnly", "tokens += count;", "break;"): "test_one_adapter",
    in_source("AddsTwice", "all->order[at - 1] >= first) continue", "all->order[at - 1] > first) continue"): MIX,
    in_source("SumsOfTheFirst", "(tokens[i] - first) * NB", "i * NB"): MIX,
    in_source(
        "FactorsOfTheFirst", "small_of(tokens[i]) + entry[0]", "small_of(tokens[0]) + entry[0]"
    ): "test_one_adapter",
}
MUTANTS = [
    pytest.param(
        Mutant(cls, suite=NativeSuite, caught_by=test, base=NativeAdapters),
        id=cls.__name__,
        marks=pytest.mark.full if cls in IN_SOURCE else (),
    )
    for cls, test in (CAUGHT | IN_SOURCE).items()
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)

"""4 bits as bitsandbytes stores them (Dettmers et al. 2023, QLoRA): NF4 and FP4 in blocks of a flat matrix."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.quantization.api import FormatContext, WeightFormat
from pegboard.plugins.quantization.formats.parts import check_shape, check_type
from pegboard.toolkit.model.coded import Blocks, CodedMatrix, StoredSlot
from pegboard.toolkit.model.layouts import TABLES, Code, Layout

STATE = ".quant_state.bitsandbytes__"
"""What the name of a matrix's description ends with, before its type."""
ABSMAX, TABLE, NESTED_ABSMAX, NESTED_TABLE = "absmax", "quant_map", "nested_absmax", "nested_quant_map"
CODES = {"nf4": Code.NF4, "fp4": Code.FP4}
_CLOSE = 1e-6
"""How far a stored table may be from the published one, of numbers up to 1."""


@dataclass(frozen=True, slots=True)
class _State:
    """What ``x.weight.quant_state.bitsandbytes__nf4`` says, JSON in bytes: the shape of the plain matrix, the size of
    blocks, and of blocks of scales that are coded themselves, with what is added to them.
    """

    kind: str
    shape: tuple[int, int]
    block: int
    nested: int = 0
    offset: float = 0.0

    @property
    def blocks(self) -> int:
        """Blocks of the flat matrix."""
        return -(-self.shape[0] * self.shape[1] // self.block)

    @property
    def within_rows(self) -> int:
        """Size of the largest blocks that end within rows, and of which the stored ones consist."""
        return math.gcd(self.shape[1], self.block)


class BitsAndBytes(WeightFormat[NoOptions]):
    """``x.weight`` uint8 [n / 2, 1] are the codes of a matrix, row after row, the first of two in the high bits;
    ``x.weight.absmax`` the scales of blocks, float32, or with double quantisation uint8: places in
    ``x.weight.nested_quant_map``, whose numbers are multiplied by ``x.weight.nested_absmax`` of blocks of scales, and
    added to an offset.
    """

    @classmethod
    def supports(cls, options: NoOptions, ctx: FormatContext) -> str | None:
        if reason := ctx.other_method("bitsandbytes"):
            return reason
        if ctx.config.get("load_in_8bit") or ctx.config.get("_load_in_8bit"):
            return "its 8 bits (LLM.int8) compute some columns apart, by their activations; 4 bits are supported"
        return None

    def matrices(self) -> Mapping[str, CodedMatrix]:
        found = {}
        for name, slot in self.ctx.tensors.items():
            matrix, mark, kind = name.partition(STATE)
            if mark:
                found[matrix] = self._matrix(matrix, _state(slot, kind), slot)
        for name, slot in self.ctx.tensors.items():
            matrix, _, last = name.rpartition(".")
            if last == ABSMAX and matrix not in found:
                raise slot.wrong(f"has nothing beside it that says its type, which would be {matrix}{STATE}nf4")
        return found

    def _matrix(self, name: str, state: _State, slot: StoredSlot) -> CodedMatrix:
        codes, (rows, cols) = check_type(self.ctx.need(name, slot.name), torch.uint8), state.shape
        if cols % 2 or state.block % 2:
            raise slot.wrong(f"has rows of {cols} numbers and blocks of {state.block}; both should be even")
        check_shape(codes, rows * cols // 2, 1)
        absmax = check_type(
            self.ctx.need(f"{name}.{ABSMAX}", codes.name), torch.uint8 if state.nested else torch.float32
        )
        check_shape(absmax, state.blocks)
        slots = {"scales": absmax, "state": slot, "table": self._table(name, state, codes)}
        if state.nested:
            slots |= {"absmax": absmax, **self._nested(name, state, codes)}
        layout = Layout(CODES[state.kind], (1, state.within_rows))
        return CodedMatrix(layout, (rows, cols), codes, lambda raw: _canonical(raw, rows), slots, _Scales(state))

    def _table(self, name: str, state: _State, codes: StoredSlot) -> StoredSlot:
        """Return the stored table. Raises ModelError where it is not the published one."""
        slot = check_type(self.ctx.need(f"{name}.{TABLE}", codes.name), torch.float32)
        check_shape(slot, 16)
        if not torch.allclose(slot.read(), torch.tensor(TABLES[CODES[state.kind]]), rtol=0, atol=_CLOSE):
            raise slot.wrong(f"has other numbers than {state.kind}")
        return slot

    def _nested(self, name: str, state: _State, codes: StoredSlot) -> dict[str, StoredSlot]:
        """Return what makes numbers of scales that are coded themselves."""
        found = {"scales": f"{name}.{NESTED_ABSMAX}", "nested_table": f"{name}.{NESTED_TABLE}"}
        slots = {role: check_type(self.ctx.need(one, codes.name), torch.float32) for role, one in found.items()}
        check_shape(slots["scales"], -(-state.blocks // state.nested))
        check_shape(slots["nested_table"], 256)
        return slots


def _state(slot: StoredSlot, kind: str) -> _State:
    """Read the description of a matrix. Raises ModelError where it is none."""
    check_type(slot, torch.uint8)
    try:
        said = json.loads(bytes(slot.read().tolist()))
        rows, cols = (int(size) for size in said["shape"])
        nested = int(said.get("nested_blocksize") or 0)
        state = _State(kind, (rows, cols), int(said["blocksize"]), nested, float(said.get("nested_offset") or 0.0))
    except (KeyError, TypeError, ValueError) as error:
        raise slot.wrong(f"does not describe a matrix of two dimensions: {error!r:.80}") from error
    if kind not in CODES or said.get("quant_type", kind) != kind:
        raise slot.wrong(f"is of type {said.get('quant_type')!r:.80}; nf4 and fp4 are supported")
    if min(rows, cols, state.block) < 1 or (nested and "nested_offset" not in said):
        raise slot.wrong("has a size below 1" if min(rows, cols, state.block) < 1 else "has no nested_offset")
    return state


def _canonical(raw: Tensor, rows: int) -> Tensor:
    """Return codes with the first of two in the low bits."""
    return (raw << 4 | raw >> 4).view(rows, -1)


@dataclass(frozen=True, slots=True)
class _Scales:
    """Makes scales float32 [rows, blocks of a row] of what is stored."""

    state: _State

    def __call__(self, tensors: Mapping[str, Tensor]) -> Blocks:
        # That of zeros is 0. Those below become NaN, so that they are found.
        state, scales = self.state, torch.where(tensors["scales"] >= 0, tensors["scales"], torch.nan)
        if state.nested:
            each = scales.repeat_interleave(state.nested)[: state.blocks]
            scales = tensors["nested_table"][tensors["absmax"].int()] * each + state.offset
        rows, cols = state.shape
        pieces = scales.repeat_interleave(state.block // state.within_rows)[: rows * cols // state.within_rows]
        return Blocks(pieces.view(rows, -1))

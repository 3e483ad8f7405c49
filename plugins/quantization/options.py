"""Options: the section `quantization`, and those of the providers of `linear`."""

from __future__ import annotations

from pegboard.core.interfaces.options import Options, SectionFields


class DenseOptions(Options):
    """Where weights are dequantised at load."""

    on_gpu: bool = False
    """On a GPU as well: faster than `torch`, and in the memory that unquantised weights take."""


class QuantizationSection(SectionFields):
    """Weights in fewer bits: the format of a checkpoint, which is found by itself, and what multiplies by its codes."""


class QuantizationFields(SectionFields):
    """Keys of the whole config."""

    quantization: QuantizationSection = QuantizationSection()
    """Weights in fewer bits: what reads them, and what multiplies by them."""

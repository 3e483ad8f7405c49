"""What finds the format of a checkpoint, and offers its weights to the model's family and its runner."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.quantization import LINEAR, WEIGHT_FORMAT

if TYPE_CHECKING:
    from pegboard.core.interfaces.choosing import Chooser
    from pegboard.core.interfaces.model_family import ModelContext
    from pegboard.core.interfaces.options import Options
    from pegboard.plugins.quantization.api import FormatContext, WeightFormat
    from pegboard.toolkit.model.coded import QuantizedWeights

logger = logging.getLogger(__name__)


class _Use(Protocol):
    use: str


class _Section(Protocol):
    format: _Use


class _Config(Protocol):
    """The config with the contracts' section."""

    quantization: _Section


class QuantizationHooks:
    """Brings the service `quantized_weights`: `QuantizedWeights` of checkpoints that have such."""

    def __init__(self, options: Options) -> None:
        """Take the section's options, of which there are none yet."""
        self._named = "auto"

    @hookimpl
    def configure(self, config: _Config) -> None:
        self._named = config.quantization.format.use

    @hookimpl
    def model_services(self, model: ModelContext, chooser: Chooser) -> Mapping[str, object]:
        """Look at the checkpoint. Raises ConfigError where no format takes it, and ModelError where one does and its
        tensors do not fit together.
        """
        from pegboard.toolkit.model.kv_config import quantization_of

        config = quantization_of(model.hf_config)
        if config is None:
            if self._named != "auto":
                text = f"{self._named!r}, but the weights of {model.directory} are not quantised, and nothing quantises"
                remedy = "set it to auto, or serve a checkpoint that is quantised"
                raise ConfigError(Problem("quantization.format.use", f"{text} them when they are read; {remedy}"))
            return {}
        from pegboard.plugins.quantization.api import FormatContext, LinearContext
        from pegboard.toolkit.model.coded import SERVICE, QuantizedWeights, slots_of

        if not any(model.directory.glob("*.safetensors*")):
            # Weights that are drawn (`load_format: dummy`) have no format; what reads weights finds none, and says so.
            linears = chooser.choose(LINEAR, LinearContext(model.device, model.dtype))
            return {SERVICE: QuantizedWeights({}, (), {}, linears)}
        tensors = slots_of(model.directory)
        # What ModelOpt keeps in a file of its own does not name it.
        named = {"quant_method": "modelopt", **config} if "quant_algo" in config else config
        chosen = _chosen(chooser, FormatContext(named, tensors))
        linears = chooser.choose(LINEAR, LinearContext(model.device, model.dtype))
        weights = QuantizedWeights(chosen.matrices(), chosen.unused(), tensors, linears)
        for matrix in weights.matrices.values():
            matrix.check()
        _log(weights)
        return {SERVICE: weights}


def _chosen(chooser: Chooser, ctx: FormatContext) -> WeightFormat[Options]:
    """Return the format of a checkpoint. Raises ConfigError where there is none, with what each of them reads."""
    try:
        return chooser.choose(WEIGHT_FORMAT, ctx)
    except ConfigError as error:
        text = (
            f"the checkpoint is quantised (quant_method {ctx.method!r:.80}), in a way that is not supported; use its "
            "16-bit weights, or another format: "
        )
        problems = [replace(one, message=text + one.message) for one in error.problems]
        raise ConfigError(problems) from error


def _log(weights: QuantizedWeights) -> None:
    sizes = Counter[str]()
    for matrix in weights.matrices.values():
        sizes[str(matrix.layout)] += matrix.nbytes
    kinds = ", ".join(f"{layout} {size / 1e6:.1f} MB" for layout, size in sizes.items())
    logger.info("quantised weights: %d matrices: %s", len(weights.matrices), kinds or "none")

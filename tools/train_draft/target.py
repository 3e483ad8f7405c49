"""The model that a head is trained for: its shape, its taps, and what of its weights the head begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from torch import Tensor

from pegboard.core.interfaces.errors import PegboardError
from pegboard.toolkit.model.decoder_spec import DecoderSpec
from pegboard.toolkit.model.model_config import read_model_config
from pegboard.toolkit.model.weights import checkpoint_files

if TYPE_CHECKING:
    from pegboard.core.engine.engine import Engine
    from pegboard.core.registry.records import ProviderRecord
    from pegboard.core.registry.registry import Registry

TAPS = 3
_LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclass(frozen=True, slots=True)
class Target:
    """A model's directory, its config.json and what that says of its decoder."""

    directory: Path
    config: Mapping[str, object]
    decoder: DecoderSpec

    @classmethod
    def of(cls, engine: Engine) -> Target:
        """Read it from an engine's model directory. Raises ModelError for an architecture that is not known, and
        PegboardError for one whose positions have axes.
        """
        directory = engine.built.directory
        config = read_model_config(directory)
        decoder = DecoderSpec.from_config(config)
        if decoder.rope.axes:
            raise PegboardError(f"train-draft: {decoder.architecture} takes media; heads for it cannot be trained here")
        return cls(directory, config, decoder)

    def rope_config(self) -> dict[str, object]:
        """Return what a head's config.json says about positions: as much as the model's."""
        found: dict[str, object] = {"rope_theta": self.decoder.rope.theta}
        scaling = self.config.get("rope_scaling") or self.config.get("rope_parameters")
        if self.decoder.rope.rope_type != "default" and isinstance(scaling, Mapping):
            found["rope_scaling"] = dict(scaling)
        return found

    def weights(self) -> dict[str, Tensor]:
        """Return what the checkpoint has of its last layer (named as within a layer), its final norm (``norm``) and its
        head (``head``, the embeddings where they are tied): what is there, in the checkpoint's dtype.
        """
        wanted = {f"layers.{self.decoder.num_layers - 1}.{name}.weight": name for name in _LAYER}
        wanted |= {"norm.weight": "norm"}
        wanted["embed_tokens.weight" if self.decoder.tied_embeddings else "lm_head.weight"] = "head"
        found: dict[str, Tensor] = {}
        for path in checkpoint_files(self.directory):
            with safe_open(str(path), "pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    short = name.removeprefix("model.").removeprefix("language_model.")
                    if short in wanted:
                        found[wanted[short]] = file.get_tensor(name)
        return found


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the places that EAGLE-3 taps: the inputs of layers 2, N // 2 and N - 3, or what comes near in a model with
    few layers.
    """
    if layers >= 7:
        return 2, layers // 2, layers - 3
    return 1, (layers + 1) // 2, layers


def check_taps(taps: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Return them. Raise PegboardError unless they are three places from 1 to `layers`, in ascending order."""
    if len(taps) != TAPS or list(taps) != sorted(taps) or not 1 <= taps[0] <= taps[-1] <= layers:
        raise PegboardError(
            f"--taps must be {TAPS} places from 1 to {layers} in ascending order, got {','.join(map(str, taps))}"
        )
    return taps


def tapping_runner(
    registry: Registry, provides: Callable[[ProviderRecord], frozenset[str]], chosen: Mapping[str, Sequence[str]]
) -> str | None:
    """Return None where the chosen providers (names, by contract) can show the model's states and lend its ends, else
    the name of a runner that can. `provides` tells what a provider can do with the config's options.

    Raises PegboardError where none can, with what to change.
    """
    runners = {one.name: provides(one) for one in registry.providers("runner") if not one.problem}
    families = {one.name: provides(one) for one in registry.providers("model_family")}
    (runner,), (family,) = chosen["runner"], chosen["model_family"]
    able = [
        name
        for name, can in runners.items()
        if {"taps", "ends"} <= can and ("own_weights" in can or "taps" in families[family])
    ]
    if runner in able:
        return None
    if able:
        return able[0]
    raise PegboardError(
        f"train-draft reads the model's states, which the model family {family!r} cannot show (it lacks the capability "
        "taps); choose another model.use"
    )

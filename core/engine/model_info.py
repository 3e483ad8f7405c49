"""What the API process may tell of a model, and what requests may ask of its engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pegboard.core import __version__
from pegboard.core.interfaces.client import ModelInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pegboard.core.engine.choose import Chosen
    from pegboard.core.pipeline.scheduler import Scheduler


def model_info(chosen: Chosen, scheduler: Scheduler) -> ModelInfo:
    """Return what the API process may tell of the model."""
    config, spec, hf_config = chosen.resolved.engine, chosen.spec, chosen.model.hf_config
    model = config.model
    served_name, *other_names = dict.fromkeys(model.served_name or [model.path.rstrip("/").rsplit("/", 1)[-1]])
    return ModelInfo(
        served_name=served_name,
        other_names=tuple(other_names),
        path=model.path,
        architecture=spec.architecture,
        architectures=tuple(hf_config.get("architectures") or ()),
        model_type=str(hf_config.get("model_type") or ""),
        max_context_len=scheduler.max_context_len,
        vocab_size=spec.vocab_size,
        max_total_tokens=scheduler.components.memory.total_tokens,
        dtype=str(chosen.model.dtype).removeprefix("torch."),
        version=__version__,
        created=int(time.time()),
        providers={contract: [one.name for one in some] for contract, some in chosen.selection.choices.items()},
        features=_features(chosen, scheduler.components.points.offers),
        hidden_size=spec.hidden_size,
        stages=scheduler.components.points.reports.info(),
        sampling_defaults=chosen.sampling_defaults,
        kv_bytes_per_token=chosen.pool.cls.bytes_per_token(spec.layers + chosen.further, chosen.kv_dtype),
    )


def _features(chosen: Chosen, offers: Sequence[str]) -> tuple[str, ...]:
    """Return what requests may ask of this engine; see ModelInfo."""
    found = list(offers)
    for contract in ("logits_processor", "sampler"):
        providers = chosen.selection.choices.get(contract, ())
        found += [f"{contract}.{one.name}" for one in providers if "params" in one.provides]
    return tuple(found)

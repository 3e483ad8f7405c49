"""Weights that are replaced while the server runs, and memory that is given back meanwhile."""

from pegboard.core.interfaces.plugin import Plugin

plugin = Plugin(
    name="weight_updates",
    version="0.1.0",
    summary="new weights from disk or as tensors without a restart, and memory given back meanwhile",
    fields={"": "pegboard.plugins.weight_updates.options:WeightUpdateFields"},
    hooks=("pegboard.plugins.weight_updates.hooks:WeightUpdateHooks",),
)

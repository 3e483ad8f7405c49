"""What each pooler makes, and which one `auto` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.pooler_basic.poolers import ClsPooler, LastPooler, MeanPooler, ModelPooler
from pegboard.plugins.row_outputs.api import PoolerContext, PoolSpan


def context(directory: Path, settings: Any = None) -> PoolerContext:
    if settings is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    return PoolerContext(directory, 4)


def pool(cls: Any, ctx: PoolerContext) -> np.ndarray[Any, Any]:
    pooler = cls(NoOptions(), ctx)
    states = torch.arange(12.0).reshape(3, 4)
    span = PoolSpan(0, 3, 3)
    return pooler.combine([pooler.reduce(states[torch.tensor(pooler.rows(span))], [span])[0].numpy()], 3)


@pytest.mark.parametrize(
    ("cls", "expected"), [(LastPooler, [8, 9, 10, 11]), (ClsPooler, [0, 1, 2, 3]), (MeanPooler, [4, 5, 6, 7])]
)
def test_values(tmp_path: Path, cls: Any, expected: list[int]) -> None:
    assert pool(cls, context(tmp_path)).tolist() == expected


@pytest.mark.parametrize(
    ("mode", "expected"), [("lasttoken", [8, 9, 10, 11]), ("cls_token", [0, 1, 2, 3]), ("mean_tokens", [4, 5, 6, 7])]
)
def test_the_models_own_choice(tmp_path: Path, mode: str, expected: list[int]) -> None:
    ctx = context(tmp_path, {f"pooling_mode_{mode}": True, "pooling_mode_max_tokens": False})
    assert ModelPooler.supports(None, ctx) is None  # type: ignore[arg-type]
    assert pool(ModelPooler, ctx).tolist() == expected


@pytest.mark.parametrize(
    "settings",
    [None, {}, {"pooling_mode_max_tokens": True}, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}],
)
def test_no_choice_of_the_model(tmp_path: Path, settings: Any) -> None:
    ctx = context(tmp_path, settings)
    assert "1_Pooling" in (ModelPooler.supports(None, ctx) or "")  # type: ignore[arg-type]
    assert LastPooler.supports(None, ctx) is None

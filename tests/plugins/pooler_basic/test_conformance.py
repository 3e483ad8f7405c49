"""The suite of Pooler on the built-in ones."""

from __future__ import annotations

from pegboard.plugins.row_outputs.suite import PoolerContract


class TestLast(PoolerContract):
    provider = "last"


class TestMean(PoolerContract):
    provider = "mean"


class TestCls(PoolerContract):
    provider = "cls"


class TestDeclared(PoolerContract):
    provider = "declared"
    files = {"1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}}

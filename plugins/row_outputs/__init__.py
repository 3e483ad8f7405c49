"""What requests may want beside tokens: logprobs of the prompt, hidden states, and embeddings, with their contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from pegboard.plugins.row_outputs.api import Pooler, PoolerContext

POOLER: Contract[Pooler, PoolerContext] = Contract(
    "pooler",
    "pooler",
    Cardinality.MATCHED,
    "pegboard.plugins.row_outputs.api:Pooler",
    "makes one vector of a prompt's hidden states, for embeddings",
    suite="pegboard.plugins.row_outputs.suite:PoolerContract",
    optional=True,
)

plugin = Plugin(
    name="row_outputs",
    version="0.1.0",
    summary="logprobs of prompts, hidden states of output tokens, embeddings",
    hooks=("pegboard.plugins.row_outputs.hooks:RowOutputHooks",),
    contracts=(POOLER,),
)

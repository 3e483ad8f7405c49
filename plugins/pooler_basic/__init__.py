"""Poolers of decoder-only models: the last token, the mean of all, the first."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="pooler_basic",
    version="0.1.0",
    summary="embeddings by the last token's hidden state, the mean of all, or the first token's",
    requires=("row_outputs",),
    providers=(
        Provider(
            contract="pooler",
            name="declared",
            factory="pegboard.plugins.pooler_basic.poolers:ModelPooler",
            summary="as the model's own 1_Pooling/config.json says",
            rank=40,
        ),
        Provider(
            contract="pooler",
            name="last",
            factory="pegboard.plugins.pooler_basic.poolers:LastPooler",
            summary="the last token's hidden state, which has seen the whole prompt",
            rank=30,
        ),
        Provider(
            contract="pooler",
            name="mean",
            factory="pegboard.plugins.pooler_basic.poolers:MeanPooler",
            summary="the mean of all tokens' hidden states",
            rank=20,
        ),
        Provider(
            contract="pooler",
            name="cls",
            factory="pegboard.plugins.pooler_basic.poolers:ClsPooler",
            summary="the first token's hidden state",
            rank=10,
        ),
    ),
)

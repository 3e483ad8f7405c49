"""What requests may want beside tokens: logprobs of the prompt, hidden states, and embeddings."""

from pegboard.core.interfaces.plugin import Plugin

plugin = Plugin(
    name="row_outputs",
    version="0.1.0",
    summary="logprobs of prompts, hidden states of output tokens, embeddings",
    hooks=("pegboard.plugins.row_outputs.hooks:RowOutputHooks",),
)

"""The model runner that calls the network layer by layer."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="runner_layered",
    version="0.1.0",
    summary="runs the network, the processors and the sampler one after the other",
    providers=(
        Provider(
            contract="runner",
            name="layered",
            factory="pegboard.plugins.runner_layered.runner:LayeredRunner",
            config="pegboard.plugins.runner_layered.options:LayeredOptions",
            summary="model family, attention backend, logits processors and sampler, layer by layer; on a GPU, decode "
            "steps as graphs",
            provides=frozenset(
                {
                    "additions",
                    "ends",
                    "graph",
                    "hidden_states",
                    "input_logprobs",
                    "overlay",
                    "ranks",
                    "sections",
                    "split_prefill",
                    "taps",
                    "updates",
                }
            ),
            rank=10,
        ),
    ),
)

"""The suite of ModelRunner on the layered runner."""

from __future__ import annotations

from pegboard.conformance.model_runner import ModelRunnerContract


class TestLayered(ModelRunnerContract):
    provider = "layered"
    prefill_graphs = {"prefill_graph_sizes": [24, 4, 8]}


class TestLayeredOnWindows(ModelRunnerContract):
    """A sliding window shorter than the prompts, and pages of one token; axes in chunks."""

    provider = "layered"
    prefill_graphs = {"prefill_graph_sizes": [24, 4, 8]}
    architecture = "mistral"
    checkpoint_settings = {"sliding_window": 8}
    page_size = 1
    tower = "qwen2_vl"

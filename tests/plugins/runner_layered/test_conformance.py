"""The suite of ModelRunner on the layered runner."""

from __future__ import annotations

from pegboard.conformance.model_runner import ModelRunnerContract


class TestLayered(ModelRunnerContract):
    provider = "layered"


class TestLayeredOnWindows(ModelRunnerContract):
    """A sliding window shorter than the prompts, and pages of one token; axes in chunks."""

    provider = "layered"
    architecture = "mistral"
    checkpoint_settings = {"sliding_window": 8}
    page_size = 1
    tower = "qwen2_vl"

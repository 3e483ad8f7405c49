"""The suite of ModelRunner on the native runner, with every architecture. tests/numeric.py has the instruction sets."""

from __future__ import annotations

from typing import Any

import tests.plugins.cpu_native.instruction_sets  # noqa: F401  skips where nothing can be compiled
from pegboard.conformance.model_runner import ModelRunnerContract


class Native(ModelRunnerContract):
    """Weights and activations are bf16: with these random weights transformers itself is off by 4 to 20% of the largest
    logit then, and this runner by 2 to 12%. See test_accuracy for both, side by side."""

    __test__ = False
    provider = "cpu_native"
    dtype = "bfloat16"
    tolerance = 0.15
    wide: dict[str, Any] = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}


class TestBest(Native):
    """The best set that there is, and heads of 64: tiles where the CPU has them."""

    __test__ = True
    checkpoint_settings = Native.wide
    options = {"threads": 2}


class TestOneThread(Native):
    __test__ = True
    checkpoint_settings = {**Native.wide, "num_key_value_heads": 6, "num_attention_heads": 6}
    options = {"threads": 1}


class TestSmallHeads(Native):
    """Heads of 16, which no tile fits."""

    __test__ = True
    options = {"threads": 3}


class TestQwen2(Native):
    """Biases, and axes in chunks."""

    __test__ = True
    tower = "qwen2_5_vl"
    architecture = "qwen2"
    checkpoint_settings = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


class TestQwen3(Native):
    """Norms of queries and keys."""

    __test__ = True
    architecture = "qwen3"
    checkpoint_settings = {**Native.wide, "num_attention_heads": 4, "num_key_value_heads": 1}


class TestMistral(Native):
    """A sliding window."""

    __test__ = True
    architecture = "mistral"
    checkpoint_settings = {**Native.wide, "sliding_window": 11}

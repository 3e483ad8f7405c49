"""The built-in passes the suite of its contract."""

from pegboard.conformance.model_family import ModelFamilyContract


class TestDenseFamily(ModelFamilyContract):
    provider = "dense"
    architectures = ("llama", "mistral", "qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")

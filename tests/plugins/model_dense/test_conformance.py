"""The built-in passes the suite of its contract."""

from pegboard.conformance.model_family import ModelFamilyContract
from pegboard.conformance.vl_checkpoints import VL_FAMILIES


class TestDenseFamily(ModelFamilyContract):
    provider = "dense"
    architectures = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", *VL_FAMILIES)

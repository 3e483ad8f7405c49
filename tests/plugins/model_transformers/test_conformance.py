"""The built-in passes the suite of its contract."""

from pegboard.conformance.model_family import ModelFamilyContract


class TestTransformersFamily(ModelFamilyContract):
    provider = "transformers"

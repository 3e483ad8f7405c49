"""The built-in passes the suite of its contract."""

from pegboard.core.testing.model_family import ModelFamilyContract


class TestTransformersFamily(ModelFamilyContract):
    provider = "transformers"

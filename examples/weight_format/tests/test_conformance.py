"""All that Pegboard demands of a format."""

from pegboard_halves.testing import TestHalves  # noqa: F401 - pytest collects it here

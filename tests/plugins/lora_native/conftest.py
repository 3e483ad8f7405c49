"""See the file beside the tests of the runner, which this is."""

import tests.plugins.cpu_native.conftest  # noqa: F401

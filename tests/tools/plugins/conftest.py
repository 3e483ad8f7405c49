"""A folder of installed plugins, for commands that look at them."""

from tests.core.conftest import site as site

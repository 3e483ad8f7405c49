"""What all tests of prefix caches start from."""

from __future__ import annotations

import pytest

from pegboard.conformance.prefix_cache.books import Books
from pegboard.conformance.suite import ContractSuite

PAGE_SIZES = [1, 4, 16]
pages = pytest.mark.parametrize("page_size", PAGE_SIZES)


class PrefixSuite(ContractSuite):
    """Builds the cache under test, and `Books` to call it through, which check owners and counters after each call."""

    contract = "prefix_cache"

    def books(self, page_size: int = 1, num_pages: int = 64) -> Books:
        return Books(self.build, num_pages, page_size)

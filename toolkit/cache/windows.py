"""How many pages the layers of a window need of a request."""

from __future__ import annotations


def reach(window: int, page_size: int) -> int:
    """Return how many pages before a page boundary hold what is read from there on: all of the tokens that a query at
    the boundary sees before itself.
    """
    return -(-(window - 1) // page_size)


def most_pages(window: int, page_size: int) -> int:
    """Return the most pages that a request has while it decodes: those before the last page boundary that it has
    passed, and two for the tokens after it: a step may be launched before the results of the last one are known.
    """
    return reach(window, page_size) + 2

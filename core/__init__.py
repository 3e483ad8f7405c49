"""Pegboard's core: typed contracts, a request pipeline, and the registry that joins plugins to both."""

__version__ = "0.1.0"

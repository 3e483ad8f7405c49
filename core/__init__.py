"""Pegboard's core: typed contracts, a request pipeline, and the registry that joins plugins to both."""

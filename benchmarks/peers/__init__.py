"""Pegboard and its peers on one machine, with one load tool: ``python -m benchmarks.peers --help``."""

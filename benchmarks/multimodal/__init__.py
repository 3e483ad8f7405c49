"""What pictures cost: ``python -m benchmarks.multimodal --help``."""

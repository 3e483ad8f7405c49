"""Draft trees: what speculators and the pipeline do with them."""

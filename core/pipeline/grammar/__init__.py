"""Grammars in the pipeline: the gate that waits for compilation, its worker processes, and the state of a request."""

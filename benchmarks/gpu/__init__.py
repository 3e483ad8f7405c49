"""Measures a GPU, and rehearses that without one; see `__main__`."""

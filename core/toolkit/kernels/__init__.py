"""Kernels that any plugin may use, and the one way in which kernels are launched."""

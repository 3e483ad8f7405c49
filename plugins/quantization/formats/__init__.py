"""Formats of quantised weights, a file each."""

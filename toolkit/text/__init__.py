"""Tokenizers, and the bytes and text of tokens."""

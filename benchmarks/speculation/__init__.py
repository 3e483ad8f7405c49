"""What speculative decoding brings, and what it costs."""

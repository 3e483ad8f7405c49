"""For output parsers: text and JSON as they arrive, piece by piece."""

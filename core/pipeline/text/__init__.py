"""Text from tokens: incremental detokenisation, stop strings and stop expressions."""

"""GGUF files: their metadata, tokenizer and weights, read into the shape of a Hugging Face checkpoint."""

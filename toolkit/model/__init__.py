"""For model families and runners: configs, weights, layers, rotary embeddings."""

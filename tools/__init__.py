"""Applications around the engine: benchmarks, the policy lab, chat and batch generation."""

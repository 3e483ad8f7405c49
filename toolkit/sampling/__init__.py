"""For samplers and logits processors: noise, masks, logprobs."""

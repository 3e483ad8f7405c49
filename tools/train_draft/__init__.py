"""`pegboard train-draft`: an EAGLE-3 draft head for a model, trained on answers that the engine generates."""

"""The engine: providers built into one scheduler, the model loaded, its memory sized; and `Engine`."""

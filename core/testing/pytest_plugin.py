"""The pytest11 plugin of the conformance kit. Loaded by every pytest of the environment, so it imports next to nothing."""

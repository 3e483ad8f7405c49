"""The configuration: its sections, where values come from, how providers are chosen, and what is wrong with it."""

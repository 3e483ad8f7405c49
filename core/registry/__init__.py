"""The registry: which plugins are installed, what they provide, and whose fault an error is."""

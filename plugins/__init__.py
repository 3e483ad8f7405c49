"""The plugins that ship with Pegboard. Each is found through its entry point, like a third party's."""

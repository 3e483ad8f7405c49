"""The plugins that ship with Pegboard. Each is found through its entry point, like anybody's."""

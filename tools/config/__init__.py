"""`pegboard config`: look at a config without starting anything."""

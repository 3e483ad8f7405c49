"""`pegboard plugins`: look at installed plugins, and start a new one from a template."""

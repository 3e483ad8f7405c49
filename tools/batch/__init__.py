"""`pegboard generate`: prompts from the command line or a file, answered by an engine in this process."""

"""The command line: `serve`. All other commands come from entry points, ours too."""

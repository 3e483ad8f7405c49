"""The command line: `serve`, `config` and `plugins`. Further commands come from entry points."""

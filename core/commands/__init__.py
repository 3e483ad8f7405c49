"""The command line's subcommands, one file per group. Each imports what it needs when it runs, and not before."""

"""``python -m pegboard``: the command line."""

from pegboard.core.cli.main import main

if __name__ == "__main__":
    main()

"""Run the command-line interface with `python -m metabridge`."""

from metabridge.cli import main

if __name__ == "__main__":
    main()

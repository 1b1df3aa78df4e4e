"""`python -m tracegrad`: the `tracegrad` command of this Python."""

from tracegrad.cli import main

if __name__ == "__main__":
    main()

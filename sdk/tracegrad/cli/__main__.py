"""`python -m tracegrad.cli`: for a process that has this Python at hand but not its scripts."""

from tracegrad.cli import main

main()

"""The version of all packages here. It stands in this place alone: pyproject.toml reads this file.
A literal: to ask the installed metadata would take an agent's process another 30 ms to import."""

VERSION = "0.1.0"

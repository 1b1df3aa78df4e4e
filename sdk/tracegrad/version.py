"""The version of all packages here. A literal, which pyproject.toml has too: to ask the installed
metadata would take an agent's process another 30 ms to import."""

VERSION = "0.1.0"

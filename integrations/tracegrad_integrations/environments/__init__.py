"""Environments of others, in both directions: driven by an agent whose calls are recorded, and such
an agent as one of them (docs/environments.md)."""

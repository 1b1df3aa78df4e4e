"""Environments of packages that have Pythons of their own."""

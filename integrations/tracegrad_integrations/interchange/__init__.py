"""Formats of traces that others define, out and in: one file with each format's fields."""

"""Calls become committed turns."""

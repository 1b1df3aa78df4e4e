"""Rows of the store in the layouts that other trainers read: `tracegrad export --layout NAME`."""

"""The routes of the proxy."""

"""The web page at /ui."""

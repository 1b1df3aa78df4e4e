"""tracegrad and its neighbours: what others' packages read, and what they bring."""

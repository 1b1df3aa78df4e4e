"""Several processes that serve one port: `tracegrad proxy --workers N`."""

"""What the proxy counts, for Prometheus: `GET /metrics`."""

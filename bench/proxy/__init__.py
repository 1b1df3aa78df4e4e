"""What the proxy costs: latency, throughput, memory, bytes stored. `python -m bench.proxy`."""

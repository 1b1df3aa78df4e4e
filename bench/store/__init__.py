"""What the store costs: turns in and out, bytes, a batch. `python -m bench.store`."""

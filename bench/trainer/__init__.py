"""What training costs: beside the plainest loop and TRL's. `python -m bench.trainer`."""

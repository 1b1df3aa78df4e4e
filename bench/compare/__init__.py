"""One task in the code of each peer: what a user writes."""

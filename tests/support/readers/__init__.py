"""Other trainers' packages, for the reading of what we write for them."""

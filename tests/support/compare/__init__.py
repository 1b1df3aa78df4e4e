"""The peers' packages, and whether the code that is written for them fits them."""

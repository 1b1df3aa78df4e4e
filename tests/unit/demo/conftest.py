"""The examples are no part of the distribution: their folder has to be named."""

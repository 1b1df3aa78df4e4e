"""The web page over a store of a million rollouts."""

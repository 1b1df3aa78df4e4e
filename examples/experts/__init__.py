"""A student learns from an expert's traces, and then from its own rewards."""

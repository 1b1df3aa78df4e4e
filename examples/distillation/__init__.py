"""A student learns from a teacher's traces, and then from its own rewards."""

"""OpenTelemetry spans of agents become spans, turns and rewards."""

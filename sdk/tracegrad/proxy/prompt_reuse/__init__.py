"""Exact continuation: from turn two on the engine gets the recorded tokens."""

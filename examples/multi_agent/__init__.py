"""Two agents on one task, of which one is trained."""

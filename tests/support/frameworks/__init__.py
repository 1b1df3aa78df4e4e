"""Agent frameworks, each with a Python of its own, and the model that their examples talk to."""

"""Harbor, in an environment of its own with a Python that it takes."""

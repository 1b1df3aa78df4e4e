"""The main job in small: an agent of a shop, and a model that gets better while it runs."""

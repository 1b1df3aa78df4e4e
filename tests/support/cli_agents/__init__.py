"""Real CLI agents, unmodified: installed, shut in with a proxy, run on a task."""

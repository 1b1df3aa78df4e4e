"""`tracegrad ui`: what the web page's list and rollout are, in a terminal (Textual)."""

"""mini-swe-agent, unmodified, learns small file tasks in sandboxes."""

"""A LangGraph agent that answers questions in SQL over a real SQLite database, and learns to."""

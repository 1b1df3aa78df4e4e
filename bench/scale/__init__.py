"""What a day of many agents takes of the proxy and the store, and which part is full first."""

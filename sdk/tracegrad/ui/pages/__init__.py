"""One module a page: what it asks the store, and its template."""

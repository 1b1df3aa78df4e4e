"""The process that writes the store for one event loop: `client.StoreWriter` in the proxy's own,
`process` starts and ends it, `child` is what it does, `frames` what they say to each other."""

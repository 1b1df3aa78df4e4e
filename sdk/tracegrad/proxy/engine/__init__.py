"""The serving engine: requests, responses, streams, weight updates, upstreams."""

"""HTTP under the proxy's endpoints: limits, bodies, streams, errors."""

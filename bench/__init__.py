"""Benchmarks that set tracegrad beside its peers, in one run on one machine."""

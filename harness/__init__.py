"""What tests and benchmarks share: processes, a Ray cluster, stores and what they hold."""

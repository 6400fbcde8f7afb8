"""Shared by benchmarks: processes, stores to measure on, and sections of results."""

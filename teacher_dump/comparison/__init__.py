"""Stores held against their teacher, which runs again over a sample."""

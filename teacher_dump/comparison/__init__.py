"""Compare stores with their teacher, which runs again over a sample."""

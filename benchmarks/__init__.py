"""Scripts that measure; each prints a table and writes its section of RESULTS.md."""

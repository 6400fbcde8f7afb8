"""The demonstration: a search over Python's documentation, by a teacher and by a small student."""

"""A dump: its options, its plan, the writing of its parts, and the identity of its store."""

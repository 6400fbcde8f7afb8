"""A dump: its options, the job over parts, and what the store says of itself."""

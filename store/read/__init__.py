"""Open a store, and read records and streams of batches."""

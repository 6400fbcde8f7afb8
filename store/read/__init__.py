"""Open and read a store: records, and streams of batches."""

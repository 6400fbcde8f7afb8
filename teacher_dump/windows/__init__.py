"""Sequences that a teacher reads: documents cut into windows, masked views, batches."""

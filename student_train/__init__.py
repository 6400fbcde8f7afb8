"""Train students from a store: its batches in their tokens, alignment, losses, the loop."""

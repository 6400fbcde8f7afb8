"""The teacher: loads its checkpoint, runs it, and extracts features of its layers and head."""

"""The teacher: its checkpoint, its forward pass, and what is read from layers and head."""

"""Search: texts ranked for queries by any model, and how good the ranking is."""

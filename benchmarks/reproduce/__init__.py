"""The papers in miniature: their teachers, arms and orderings."""

"""The student as a model: its kind, its vocabulary, its start, and which weights move."""

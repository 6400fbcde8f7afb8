"""The student as a model: its kind, vocabulary, initial weights, and which weights are trained."""

"""Masked-LM training of a checkpoint or of a new model, and its scores."""

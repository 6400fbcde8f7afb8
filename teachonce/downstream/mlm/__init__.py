"""Masked-LM training of a checkpoint, continued or begun, and its scores."""

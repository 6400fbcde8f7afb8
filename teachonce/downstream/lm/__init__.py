"""Scores decoders: how well they predict the next tokens of a text."""

"""Trains a checkpoint as a masked LM, fine-tunes it, scores it and measures its speed."""

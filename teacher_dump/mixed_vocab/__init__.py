"""Trains a student's embeddings within the teacher (Zhao et al. 2021, stage I)."""

"""Losses: a registry with one entry for each, and their formulas, pure functions of tensors."""

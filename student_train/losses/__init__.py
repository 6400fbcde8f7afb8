"""Losses: a registry with an entry for each, and their formulas, pure functions of tensors."""

"""Losses: a registry with one entry for each, and their formulas, which are pure functions of
tensors."""

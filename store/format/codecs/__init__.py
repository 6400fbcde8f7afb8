"""Codecs: how values of the teacher become the codes that a store keeps (formulas in FORMAT.md)."""

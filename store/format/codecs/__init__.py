"""Codecs encode the teacher's values as stored codes (formulas in FORMAT.md, section 7)."""

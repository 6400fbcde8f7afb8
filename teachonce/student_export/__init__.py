"""Exports a student to files that run where the user runs them, and measures what they keep."""

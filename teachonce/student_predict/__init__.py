"""Answers for texts, by a student or by an export of it."""

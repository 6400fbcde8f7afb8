"""Answers texts with a student or with an export of it."""

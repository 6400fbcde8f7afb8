"""Texts that a teacher reads, with their gold labels: files, tables, datasets of the hub."""

"""Texts that a teacher reads, with their gold labels: from files, tables and datasets of the
hub."""

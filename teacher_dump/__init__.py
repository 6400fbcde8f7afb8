"""Run a teacher over a corpus and keep what it knew: corpus, windows, forward passes, store."""

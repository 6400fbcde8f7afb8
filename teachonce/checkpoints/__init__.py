"""Checkpoints: finds and loads models of any kind, for teachers, students, scores and exports."""

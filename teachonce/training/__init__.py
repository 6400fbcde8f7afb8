"""Shared by all trainings: the loop, its checkpoints, optimizers, learning rates, vocabularies."""

"""A complete training: the run, its training.json and the model card."""

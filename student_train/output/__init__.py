"""A student from start to finish: the run, its training.json and its model card."""

"""Tasks with labelled examples: fine-tuning, scores, a linear probe."""

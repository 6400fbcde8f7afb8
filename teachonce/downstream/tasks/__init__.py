"""Tasks with labelled examples: fine-tuning for them, scores, a linear probe."""

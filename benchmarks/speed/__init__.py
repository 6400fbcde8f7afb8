"""Time and memory of dumping, aligning, training and fine-tuning."""

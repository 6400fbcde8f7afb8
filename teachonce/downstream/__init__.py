"""Uses a checkpoint: trains it as a masked LM, fine-tunes, scores, probes and measures it."""

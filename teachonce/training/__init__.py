"""What any training here needs: the loop, its checkpoints, optimizers, rates, vocabularies."""

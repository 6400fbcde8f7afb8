"""Use a checkpoint: continue its masked-LM training, fine-tune it on a task, probe its features."""

"""The batches of a student: its tokens and masks, the alignment, the teacher's targets."""

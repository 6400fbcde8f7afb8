"""A store's batches as a student reads them: tokens, masks, alignment, the teacher's targets."""

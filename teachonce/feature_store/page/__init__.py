"""The page of `feature-store page`: sequences of a store with the tokens of teacher and student."""

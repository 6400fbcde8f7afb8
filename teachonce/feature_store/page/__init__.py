"""The page of `feature-store page`: sequences of a store, with a student's tokens beside them."""

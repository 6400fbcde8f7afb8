"""Write a store: start it, publish its parts, seal it."""

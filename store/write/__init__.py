"""Write a store: begin, parts, seal."""

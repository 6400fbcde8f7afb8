"""Search: rank texts for queries with any model, and score the rankings."""

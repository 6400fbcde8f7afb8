"""What a student is asked for: its options, stages and recipes, as data."""

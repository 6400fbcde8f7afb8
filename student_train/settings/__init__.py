"""The settings of a student as data: its options, stages and recipes."""

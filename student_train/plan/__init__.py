"""The plan of a training: its options, compared with the stores once."""

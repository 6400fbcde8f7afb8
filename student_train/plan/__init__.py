"""The plan of a training: what the options ask for, compared with the stores once."""
